//! Drafts of an EAGLE-3 head.

mod arithmetic;
mod following;
pub(super) mod golden;
mod limits;
mod loading;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use refrain_protocol::TokenId;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::ModelError;
use crate::attention::DraftKv;
use crate::blocks::Branch;
use crate::config::WeightFormat;
use crate::eagle3::{Head, HeadForward};
use crate::files::HeadFiles;
use crate::forward::Forward;
use crate::kv::{BlockCount, KvCache, KvShape};
use crate::weights::Model;

use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{VOCAB, random_tensors, tiny, write_model};
use super::weight_files::FileTensor;

const DRAFT_VOCAB: usize = 45;

/// Sizes that are neither the target's nor multiples of anything.
fn head_config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB,
        "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 22, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
        "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": true}
    })
}

/// Every tensor of the published layout that `config` needs, random but for `d2t` and `t2d`.
fn head_tensors(config: &Value, seed: u64) -> HashMap<String, FileTensor> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, inner) = (size("hidden_size"), size("intermediate_size"));
    let query = size("num_attention_heads") * size("head_dim");
    let key = size("num_key_value_heads") * size("head_dim");
    let ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"].as_array();
    let fused = ids.map_or(3, Vec::len) * tiny().architecture.hidden_size;
    let draft_vocab = size("draft_vocab_size");
    let mut shapes = vec![
        ("fc.weight".to_owned(), vec![hidden, fused]),
        ("norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![draft_vocab, hidden]),
    ];
    for (part, shape) in [
        ("hidden_norm", vec![hidden]),
        ("input_layernorm", vec![hidden]),
        ("post_attention_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![query, 2 * hidden]),
        ("self_attn.k_proj", vec![key, 2 * hidden]),
        ("self_attn.v_proj", vec![key, 2 * hidden]),
        ("self_attn.o_proj", vec![hidden, query]),
        ("mlp.gate_proj", vec![inner, hidden]),
        ("mlp.up_proj", vec![inner, hidden]),
        ("mlp.down_proj", vec![hidden, inner]),
    ] {
        shapes.push((format!("midlayer.{part}.weight"), shape));
    }
    let mut tensors = random_tensors(shapes, Dtype::F32, seed);
    tensors.insert("d2t".into(), offsets(&guessed(draft_vocab)));
    tensors
}

/// The tokens that the test's heads can guess: in no order, and some not at all.
fn guessed(draft_vocab: usize) -> Vec<usize> {
    // 7 has no factor in common with the vocabulary's size, so all are different.
    (0..draft_vocab)
        .map(|id| (7 * id + 3) % VOCAB as usize)
        .collect()
}

fn offsets(tokens: &[usize]) -> FileTensor {
    let offsets: Vec<i64> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| *token as i64 - id as i64)
        .collect();
    FileTensor::integers(&offsets)
}

/// Writes and loads a head of the tiny model.
fn load_head(config: &Value, tensors: &HashMap<String, FileTensor>) -> Result<Head, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), config, tensors);
    let files = HeadFiles::from_dir(folder.path())?;
    Head::load(&files, &tiny(), WeightFormat::F32)
}

/// The head that most tests share.
pub(super) fn tiny_head() -> Arc<Head> {
    static HEAD: OnceLock<Arc<Head>> = OnceLock::new();
    HEAD.get_or_init(|| {
        let config = head_config();
        Arc::new(load_head(&config, &head_tensors(&config, 21)).unwrap())
    })
    .clone()
}

/// A head beside its target, pass by pass: a text, and a tree under its end.
struct Reading {
    target: Arc<Model>,
    head: Arc<Head>,
    /// States at every position but the last.
    captured: Vec<f32>,
    /// Output of the target's last layer there, through its head.
    target_logits: Vec<f32>,
    forward: HeadForward,
    kv: KvCache,
    rows: DraftKv,
    /// Output of the text's last row, then of each row of the tree.
    hidden: Vec<f32>,
}

impl Reading {
    fn new(target: Arc<Model>, head: Arc<Head>, text: &[TokenId]) -> Self {
        let computed = text.len() - 1;
        let kv = |shape| KvCache::new(shape, BlockCount::default());
        let mut target_kv = kv(KvShape::of(&target.architecture));
        target_kv.grow(computed);
        let branch = Branch {
            capture: true,
            logits: true,
            ..Branch::new(&mut target_kv, 0, &text[..computed])
        };
        let pass = Forward::new(&target, &head.shape.captured, 1).run(&target, &mut [branch]);
        let shape = KvShape::of(&head.shape.architecture);
        Reading {
            captured: (0..computed)
                .flat_map(|row| pass.captured(0, row).to_vec())
                .collect(),
            target_logits: pass.logits(0, None).to_vec(),
            forward: HeadForward::new(&head, 1),
            kv: kv(shape),
            rows: DraftKv::new(shape, 64),
            hidden: Vec::new(),
            target,
            head,
        }
    }

    /// Logits of the last row of the text, from `first` on in pieces of `piece` rows.
    fn follow(&mut self, text: &[TokenId], first: usize, piece: usize) -> Vec<f32> {
        let width = self.head.captured_width(&self.target);
        let mut logits = Vec::new();
        let rows: Vec<usize> = (first..text.len() - 1).collect();
        for rows in rows.chunks(piece) {
            let (start, end) = (rows[0], rows[0] + rows.len());
            self.kv.grow(end - first);
            let branch = Branch {
                logits: true,
                ..Branch::new(&mut self.kv, start - first, &text[start + 1..=end])
            };
            let outputs = self.forward.follow(
                &self.head,
                &self.target,
                &mut [branch],
                &self.captured[start * width..end * width],
            );
            logits = outputs.logits(0, 0).to_vec();
            self.hidden = outputs.hidden(0, 0).to_vec();
        }
        logits
    }

    /// Logits of the nodes from `known` on; the earlier ones have been computed before.
    fn guess(&mut self, nodes: &[TokenId], parents: &[Option<u32>], known: usize) -> Vec<Vec<f32>> {
        let width = self.head.shape.architecture.hidden_size;
        let hidden: Vec<f32> = parents[known..]
            .iter()
            .flat_map(|parent| {
                let row = parent.map_or(0, |parent| parent as usize + 1);
                self.hidden[row * width..][..width].to_vec()
            })
            .collect();
        let end = self.kv.len();
        let branch = Branch {
            nodes,
            parents,
            known,
            logits: true,
            ..Branch::new(&mut self.kv, end, &[])
        };
        let outputs = self.forward.guess(
            &self.head,
            &self.target,
            &mut [branch],
            &mut [&mut self.rows],
            &hidden,
        );
        (0..nodes.len() - known)
            .map(|row| {
                self.hidden.extend_from_slice(outputs.hidden(0, row));
                outputs.logits(0, row).to_vec()
            })
            .collect()
    }
}
