//! Tests of EAGLE-3 heads.

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

use crate::drafter::eagle3::{Eagle3Head, Eagle3Network};
use crate::drafter::{DraftNetwork, RowStates};
use crate::kernels::WeightFormat;
use crate::model::HeadFiles;
use crate::model::Model;
use crate::model::ModelError;
use crate::network::Branch;
use crate::network::DraftKv;
use crate::network::ModelForward;
use crate::network::{BlockCount, KvCache, KvShape};

use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{VOCAB, random_tensors, tiny, write_model};
use super::weight_files::FileTensor;

const DRAFT_VOCAB: usize = 45;

/// Returns a config whose sizes differ from the target's and are no multiples of a panel.
fn head_config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB,
        "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 22, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
        "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1], "use_aux_hidden_state": true}
    })
}

/// Returns the tensors of the published layout that `config` needs. All are random, except `d2t`.
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

/// Returns the tokens that the tests' heads can guess. They are unordered, and some tokens are missing.
fn guessed(draft_vocab: usize) -> Vec<usize> {
    // 7 is coprime to the size of the vocabulary, so the tokens are distinct.
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

/// Writes a head of the tiny model to files, and loads it.
fn load_head(
    config: &Value,
    tensors: &HashMap<String, FileTensor>,
) -> Result<Eagle3Head, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), config, tensors);
    let files = HeadFiles::from_dir(folder.path())?;
    Eagle3Head::load(&files, &tiny(), WeightFormat::F32)
}

/// Returns the head that most tests share.
pub(super) fn tiny_head() -> Arc<Eagle3Head> {
    static HEAD: OnceLock<Arc<Eagle3Head>> = OnceLock::new();
    HEAD.get_or_init(|| {
        let config = head_config();
        Arc::new(load_head(&config, &head_tensors(&config, 21)).unwrap())
    })
    .clone()
}

/// Returns how many floats the target captures per row.
fn captured_width(head: &Eagle3Head, target: &Model) -> usize {
    head.shape.captured_layers.len() * target.architecture.hidden_size
}

/// A head that reads a text and then a draft tree, one pass at a time.
struct Reading {
    target: Arc<Model>,
    head: Arc<Eagle3Head>,
    /// Captured states of every position but the last.
    captured: Vec<f32>,
    /// The target's logits after the last of these positions.
    target_logits: Vec<f32>,
    network: Eagle3Network,
    kv: KvCache,
    drafts: [DraftKv; 1],
    /// Hidden states of the text's last row, then of each row of the tree.
    hidden: Vec<f32>,
}

impl Reading {
    fn new(target: Arc<Model>, head: Arc<Eagle3Head>, text: &[TokenId]) -> Self {
        let computed = text.len() - 1;
        let kv = |shape| KvCache::new(shape, BlockCount::default());
        let mut target_kv = kv(KvShape::of(&target.architecture));
        target_kv.grow(computed);
        let branch = Branch {
            wants_states: true,
            wants_logits: true,
            ..Branch::new(&mut target_kv, 0, &text[..computed])
        };
        let pass =
            ModelForward::new(&target, &head.shape.captured_layers, 1).run(&target, &mut [branch]);
        let shape = KvShape::of(&head.shape.architecture);
        Reading {
            captured: (0..computed)
                .flat_map(|row| pass.captured(0, row).to_vec())
                .collect(),
            target_logits: pass.logits(0, None).to_vec(),
            network: Eagle3Network::new(head.clone(), 1),
            kv: kv(shape),
            drafts: [DraftKv::new(shape, 64)],
            hidden: Vec::new(),
            target,
            head,
        }
    }

    /// Reads the text from row `first` on, in pieces of `piece` rows, and returns the logits of the last row.
    fn follow(&mut self, text: &[TokenId], first: usize, piece: usize) -> Vec<f32> {
        let width = captured_width(&self.head, &self.target);
        let mut logits = Vec::new();
        let rows: Vec<usize> = (first..text.len() - 1).collect();
        for rows in rows.chunks(piece) {
            let (start, end) = (rows[0], rows[0] + rows.len());
            self.kv.grow(end - first);
            let branch = Branch {
                wants_logits: true,
                ..Branch::new(&mut self.kv, start - first, &text[start + 1..=end])
            };
            let outputs = self.network.compute(
                Some(&self.target),
                &mut [branch],
                &mut self.drafts,
                RowStates::Captured(&self.captured[start * width..end * width]),
            );
            let outputs = outputs.unwrap();
            logits = outputs.logits(0, 0).to_vec();
            self.hidden = outputs.hidden(0, 0).to_vec();
        }
        logits
    }

    /// Returns the logits of the nodes from `known` on. The earlier ones must have been computed before.
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
            computed_nodes: known,
            wants_logits: true,
            ..Branch::new(&mut self.kv, end, &[])
        };
        let outputs = self.network.compute(
            Some(&self.target),
            &mut [branch],
            &mut self.drafts,
            RowStates::OfParents(&hidden),
        );
        let outputs = outputs.unwrap();
        (0..nodes.len() - known)
            .map(|row| {
                self.hidden.extend_from_slice(outputs.hidden(0, row));
                outputs.logits(0, row).to_vec()
            })
            .collect()
    }
}
