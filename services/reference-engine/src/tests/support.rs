//! Small random models, and helpers to run them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use refrain_protocol::engine::{Draft, Sampling, SessionSpec, StepItem, StepOutput, StepRequest};
use refrain_protocol::{ApiError, EngineSessionId, NamespaceId, TokenId};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::config::EngineConfig;
use crate::drafter::DraftNetwork;
use crate::drafter::eagle3::{Eagle3Head, Eagle3Network};
use crate::engine::{EngineCore, StepReport};
use crate::kernels::WeightFormat;
use crate::model::Model;
use crate::model::ModelFiles;

use super::weight_files::{FileTensor, write_weights};

/// A generator of pseudo-random numbers that are the same on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns a number from -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }

    pub(crate) fn tokens(&mut self, count: usize) -> Vec<TokenId> {
        (0..count)
            .map(|_| self.below(VOCAB as usize) as TokenId)
            .collect()
    }
}

pub(crate) const VOCAB: u32 = 61;

/// Returns a config whose sizes are no multiples of the kernels' tiles.
pub(crate) fn tiny_config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 40,
        "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 36, "max_position_embeddings": 200, "rms_norm_eps": 1e-5, "tie_word_embeddings": false
    })
}

/// Returns names and shapes of the tensors that `config` needs.
pub(crate) fn shapes(config: &Value) -> Vec<(String, Vec<usize>)> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, inner) = (size("hidden_size"), size("intermediate_size"));
    let query = size("num_attention_heads") * size("head_dim");
    let key = size("num_key_value_heads") * size("head_dim");
    let mut shapes = vec![
        (
            "model.embed_tokens.weight".to_owned(),
            vec![size("vocab_size"), hidden],
        ),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config["tie_word_embeddings"].as_bool().unwrap() {
        shapes.push((
            "lm_head.weight".to_owned(),
            vec![size("vocab_size"), hidden],
        ));
    }
    for layer in 0..size("num_hidden_layers") {
        for (part, shape) in [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![query, hidden]),
            ("self_attn.k_proj", vec![key, hidden]),
            ("self_attn.v_proj", vec![key, hidden]),
            ("self_attn.o_proj", vec![hidden, query]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
        let attention = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        match config["model_type"].as_str() {
            Some("qwen2") => shapes.extend([
                (attention("q_proj.bias"), vec![query]),
                (attention("k_proj.bias"), vec![key]),
                (attention("v_proj.bias"), vec![key]),
            ]),
            Some("qwen3") => shapes.extend(
                ["q_norm.weight", "k_norm.weight"]
                    .map(|part| (attention(part), vec![size("head_dim")])),
            ),
            _ => {}
        }
    }
    shapes
}

/// Returns random weights of the given type.
pub(crate) fn tensors(config: &Value, dtype: Dtype, seed: u64) -> HashMap<String, FileTensor> {
    random_tensors(shapes(config), dtype, seed)
}

/// Returns random tensors. They are scaled so that products are about as large as their inputs.
pub(crate) fn random_tensors(
    shapes: Vec<(String, Vec<usize>)>,
    dtype: Dtype,
    seed: u64,
) -> HashMap<String, FileTensor> {
    let mut random = Random(seed);
    shapes
        .into_iter()
        .map(|(name, shape)| {
            let count = shape.iter().product();
            let scale = if shape.len() == 1 {
                1.0
            } else {
                2.0 / (shape[1] as f32).sqrt()
            };
            let values: Vec<f32> = (0..count).map(|_| random.float() * scale).collect();
            (name, FileTensor::floats(dtype, &shape, &values))
        })
        .collect()
}

/// Writes a model folder.
pub(crate) fn write_model(folder: &Path, config: &Value, tensors: &HashMap<String, FileTensor>) {
    std::fs::write(
        folder.join("config.json"),
        serde_json::to_vec(config).unwrap(),
    )
    .unwrap();
    write_weights(&folder.join("model.safetensors"), tensors);
}

/// Writes a model folder, and loads it.
pub(crate) fn load(
    config: &Value,
    tensors: &HashMap<String, FileTensor>,
) -> Result<Model, crate::model::ModelError> {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), config, tensors);
    Model::load(
        &ModelFiles::from_dir(folder.path()).unwrap(),
        WeightFormat::F32,
    )
}

/// Returns the model that most tests share.
pub(crate) fn tiny() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let config = tiny_config();
            Arc::new(load(&config, &tensors(&config, Dtype::F32, 11)).unwrap())
        })
        .clone()
}

impl EngineCore {
    /// Runs a whole step: [`EngineCore::begin`], [`EngineCore::draft`] and [`EngineCore::verify`].
    pub(crate) fn step(
        &mut self,
        request: StepRequest,
        now: Instant,
    ) -> Result<StepReport, ApiError> {
        let mut batch = self.begin(request, now)?;
        self.draft(&mut batch);
        Ok(self.verify(batch, now))
    }
}

/// An engine without a thread, and a clock that stands still.
pub(crate) struct TestEngine {
    pub(crate) core: EngineCore,
    pub(crate) now: Instant,
}

pub(crate) fn engine(config: EngineConfig) -> TestEngine {
    TestEngine {
        core: EngineCore::new(tiny(), None, &config),
        now: Instant::now(),
    }
}

/// Creates an engine whose drafter is a head.
pub(crate) fn engine_with_head(head: Arc<Eagle3Head>, config: EngineConfig) -> TestEngine {
    engine_with_drafter(by_head(head), config)
}

/// Creates an engine with a drafter.
pub(crate) fn engine_with_drafter(
    network: Box<dyn DraftNetwork>,
    config: EngineConfig,
) -> TestEngine {
    TestEngine {
        core: EngineCore::new(tiny(), Some(network), &config),
        now: Instant::now(),
    }
}

pub(crate) fn by_head(head: Arc<Eagle3Head>) -> Box<dyn DraftNetwork> {
    Box::new(Eagle3Network::new(head, 1))
}

/// Returns an item that continues an open session.
pub(crate) fn item(session: u128, keep_len: usize, tokens: &[TokenId]) -> StepItem {
    StepItem {
        self_draft: None,
        session: EngineSessionId(session),
        open: None,
        keep_len: keep_len as u32,
        tokens: tokens.to_vec(),
        sample: true,
        draft: None,
        max_emit: 1000,
    }
}

/// Returns an item that opens its session.
pub(crate) fn opening(session: u128, sampling: &Sampling, tokens: &[TokenId]) -> StepItem {
    let spec = SessionSpec {
        namespace: NamespaceId(1),
        sampling: sampling.clone(),
        prompt_len: tokens.len() as u32,
        ..SessionSpec::default()
    };
    StepItem {
        self_draft: None,
        open: Some(spec),
        ..item(session, 0, tokens)
    }
}

pub(crate) fn chain(tokens: &[TokenId]) -> Draft {
    Draft {
        tokens: tokens.to_vec(),
        parents: (0..tokens.len() as u32)
            .map(|node| node.checked_sub(1))
            .collect(),
    }
}

impl TestEngine {
    pub(crate) fn steps(&mut self, items: Vec<StepItem>) -> Vec<Result<StepOutput, ApiError>> {
        self.core
            .step(StepRequest { items }, self.now)
            .unwrap()
            .results
    }

    pub(crate) fn try_step(&mut self, item: StepItem) -> Result<StepOutput, ApiError> {
        self.steps(vec![item]).remove(0)
    }

    pub(crate) fn step(&mut self, item: StepItem) -> StepOutput {
        self.try_step(item).unwrap()
    }

    /// Decodes `count` tokens after `prompt` in a new session, one per step.
    pub(crate) fn decode(
        &mut self,
        session: u128,
        sampling: &Sampling,
        prompt: &[TokenId],
        count: usize,
    ) -> Vec<TokenId> {
        let mut output = self.step(opening(session, sampling, prompt)).emitted;
        while output.len() < count {
            let emitted = self
                .step(item(session, prompt.len() + output.len(), &[]))
                .emitted;
            output.extend(emitted);
        }
        output
    }
}
