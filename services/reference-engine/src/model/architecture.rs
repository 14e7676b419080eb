//! The shape of the network, read from `config.json` and checked.

use serde::Deserialize;
use serde_json::Value;

use super::error::ModelError;

/// The shape of a Llama, Qwen2 or Qwen3 network. Every size is at least 1, and the sizes are consistent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Architecture {
    /// Number of tokens. All token ids are below it.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. It divides `heads`.
    pub kv_heads: usize,
    /// Width of a head, which is even.
    pub head_dim: usize,
    /// Longest text, in tokens.
    pub max_context: usize,
    /// The epsilon that norms add to the mean square.
    pub norm_eps: f32,
    /// Radians per position of each pair of a head, `head_dim / 2` of them.
    pub rope_frequencies: Vec<f32>,
    /// Whether the projections to queries, keys and values have a bias (Qwen2).
    pub qkv_bias: bool,
    /// Whether each head of the queries and keys has a norm (Qwen3).
    pub head_norms: bool,
    /// Whether the output head reuses the embedding.
    pub tied_head: bool,
    /// Token ids that end an output.
    pub eos_token_ids: Vec<u32>,
}

/// The keys that are read from `config.json`. All others are ignored.
#[derive(Deserialize)]
struct ConfigJson {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    /// Newer files keep theta and scaling here.
    rope_parameters: Option<Value>,
    #[serde(default)]
    tie_word_embeddings: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(default)]
    layer_types: Vec<String>,
    quantization_config: Option<Value>,
    eos_token_id: Option<EosIds>,
}

/// The content of `generation_config.json`.
#[derive(Deserialize)]
struct GenerationJson {
    eos_token_id: Option<EosIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EosIds {
    One(u32),
    Many(Vec<u32>),
}

impl EosIds {
    fn into_vec(self) -> Vec<u32> {
        match self {
            EosIds::One(id) => vec![id],
            EosIds::Many(ids) => ids,
        }
    }
}

/// The end tokens that a `generation_config.json` names.
///
/// # Errors
/// It is damaged.
pub(crate) fn end_tokens(generation: Option<&[u8]>) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(generation) = generation else {
        return Ok(None);
    };
    let generation: GenerationJson = serde_json::from_slice(generation)
        .map_err(|error| ModelError::Config(format!("generation_config.json: {error}")))?;
    Ok(generation.eos_token_id.map(EosIds::into_vec))
}

/// The networks that a `config.json` may describe: `model_type`, and the name in `architectures`.
type Kinds = &'static [(&'static str, &'static str)];

const QWEN2: &str = "qwen2";
const QWEN3: &str = "qwen3";
const MODELS: Kinds = &[
    ("llama", "LlamaForCausalLM"),
    (QWEN2, "Qwen2ForCausalLM"),
    (QWEN3, "Qwen3ForCausalLM"),
];
const HEADS: Kinds = &[
    ("llama", "LlamaForCausalLMEagle3"),
    ("llama", "LlamaForCausalLM"),
];

/// Upper limit of every size in `config.json`. It catches nonsense before memory is allocated by it.
const SIZE_MAX: usize = 1 << 24;

impl Architecture {
    /// Reads `config.json`, and the end tokens from `generation_config.json` if there is one.
    ///
    /// # Errors
    /// Fails for a key that is missing or wrong, and for a network of another kind.
    pub(crate) fn from_json(config: &[u8], generation: Option<&[u8]>) -> Result<Self, ModelError> {
        Architecture::of(serde_json::from_slice(config)?, MODELS, generation)
    }

    /// Reads the `config.json` of an EAGLE-3 head, which is one Llama layer. Its context length and end tokens are
    /// those of the target, so the file's own are ignored.
    ///
    /// # Errors
    /// Fails for a key that is missing or wrong, and for a network of another kind.
    pub(crate) fn of_head(config: &[u8]) -> Result<Self, ModelError> {
        let mut json: Value = serde_json::from_slice(config)?;
        if let Some(json) = json.as_object_mut() {
            json.remove("eos_token_id");
            json.insert("max_position_embeddings".into(), SIZE_MAX.into());
        }
        let json: ConfigJson = serde_json::from_value(json)?;
        let (key, layers) = ("num_hidden_layers", json.num_hidden_layers);
        ModelError::unless_supported(layers == 1, key, layers, "heads of one layer")?;
        Architecture::of(json, HEADS, None)
    }

    fn of(json: ConfigJson, kinds: Kinds, generation: Option<&[u8]>) -> Result<Self, ModelError> {
        let model_type = json.check_kind(kinds)?;
        let kv_heads = json.num_key_value_heads.unwrap_or(json.num_attention_heads);
        json.check_sizes(kv_heads)?;
        let (hidden, heads) = (json.hidden_size, json.num_attention_heads);
        ModelError::unless(
            json.head_dim.is_some() || hidden.is_multiple_of(heads),
            || {
                format!(
                    "hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing"
                )
            },
        )?;
        let head_dim = json.head_dim.unwrap_or(hidden / heads);
        ModelError::unless(head_dim > 0 && head_dim.is_multiple_of(2), || {
            format!("head_dim is {head_dim}; it must be even and positive")
        })?;
        let rope_frequencies = json.rope_frequencies(head_dim)?;
        let mut eos_token_ids = json.eos_token_id.map(EosIds::into_vec).unwrap_or_default();
        // The end tokens for generation take precedence over those of training.
        if let Some(ids) = end_tokens(generation)? {
            eos_token_ids = ids;
        }
        for id in &eos_token_ids {
            ModelError::unless((*id as usize) < json.vocab_size, || {
                format!(
                    "eos_token_id {id} must be below vocab_size {}",
                    json.vocab_size
                )
            })?;
        }
        Ok(Architecture {
            vocab_size: json.vocab_size,
            hidden_size: json.hidden_size,
            intermediate_size: json.intermediate_size,
            layers: json.num_hidden_layers,
            heads: json.num_attention_heads,
            kv_heads,
            head_dim,
            max_context: json.max_position_embeddings,
            norm_eps: json.rms_norm_eps as f32,
            rope_frequencies,
            qkv_bias: model_type == QWEN2,
            head_norms: model_type == QWEN3,
            tied_head: json.tie_word_embeddings,
            eos_token_ids,
        })
    }
}

impl ConfigJson {
    /// The `model_type` of the network, one of `kinds`.
    fn check_kind(&self, kinds: Kinds) -> Result<&'static str, ModelError> {
        let named = self.architectures.as_ref().and_then(|names| names.first());
        let is_named = named.is_some() || self.model_type.is_some();
        let found = kinds.iter().find(|(model_type, name)| {
            is_named
                && self.model_type.as_ref().is_none_or(|of| of == model_type)
                && named.is_none_or(|of| of == name)
        });
        let kind_found = format!("{:?} ({:?})", self.model_type, self.architectures);
        let supported = kinds
            .iter()
            .map(|(of, name)| format!("{of:?} ([{name:?}])"));
        let supported = supported.collect::<Vec<_>>().join(", ");
        let full = self.layer_types.iter().all(|of| of == "full_attention");
        let slides = self.use_sliding_window || !full;
        let act = self.hidden_act.as_deref().unwrap_or("silu");
        let without_bias = "projections without bias";
        for (fits, key, found, supported) in [
            (
                found.is_some(),
                "model_type (architectures)",
                kind_found,
                supported.as_str(),
            ),
            (act == "silu", "hidden_act", format!("{act:?}"), "\"silu\""),
            (
                !self.attention_bias,
                "attention_bias",
                "true".into(),
                without_bias,
            ),
            (!self.mlp_bias, "mlp_bias", "true".into(), without_bias),
            (
                !slides,
                "use_sliding_window (layer_types)",
                "set".into(),
                "attention to the whole text",
            ),
            (
                self.quantization_config.is_none(),
                "quantization_config",
                "set".into(),
                "f32, f16 and bf16 weights",
            ),
        ] {
            ModelError::unless_supported(fits, key, found, supported)?;
        }
        Ok(found.map_or("", |(model_type, _)| model_type))
    }

    fn check_sizes(&self, kv_heads: usize) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", kv_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (key, size) in sizes {
            ModelError::unless((1..=SIZE_MAX).contains(&size), || {
                format!("{key} is {size}; it must be from 1 to {SIZE_MAX}")
            })?;
        }
        let (heads, eps) = (self.num_attention_heads, self.rms_norm_eps);
        ModelError::unless(heads.is_multiple_of(kv_heads), || {
            format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        })?;
        ModelError::unless(eps > 0.0 && eps < 1.0, || {
            format!("rms_norm_eps is {eps}; it must be between 0 and 1")
        })
    }

    /// Returns the radians per position of each pair: theta^(-2i / head_dim), scaled as `rope_scaling` says.
    fn rope_frequencies(&self, head_dim: usize) -> Result<Vec<f32>, ModelError> {
        let scaling = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let number = |key: &str| {
            scaling
                .and_then(|scaling| scaling.get(key))
                .and_then(Value::as_f64)
        };
        let theta = self
            .rope_theta
            .or_else(|| number("rope_theta"))
            .unwrap_or(10_000.0);
        ModelError::unless(theta.is_finite() && theta > 1.0, || {
            format!("rope_theta is {theta}; it must be greater than 1")
        })?;
        let plain = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64));
        let kind = scaling
            .and_then(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type")))
            .map_or(Some("default"), Value::as_str);
        let needed = |key: &'static str| {
            number(key).filter(|value| *value > 0.0).ok_or_else(|| {
                ModelError::Config(format!("rope_scaling of this type needs a positive {key}"))
            })
        };
        match kind {
            Some("default") => Ok(plain.map(|frequency| frequency as f32).collect()),
            Some("linear") => {
                let factor = needed("factor")?;
                Ok(plain.map(|frequency| (frequency / factor) as f32).collect())
            }
            Some("llama3") => {
                let factor = needed("factor")?;
                let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
                let trained = needed("original_max_position_embeddings")?;
                ModelError::unless(high > low, || {
                    "rope_scaling: high_freq_factor must be greater than low_freq_factor".into()
                })?;
                Ok(plain
                    .map(|frequency| llama3(frequency, factor, low, high, trained) as f32)
                    .collect())
            }
            other => {
                let found = other.map_or("not a string".into(), |kind| format!("{kind:?}"));
                let supported = "\"default\", \"linear\" and \"llama3\"";
                Err(ModelError::unsupported(
                    "rope_scaling.rope_type",
                    found,
                    supported,
                ))
            }
        }
    }
}

/// Llama 3's scaling: low frequencies are divided by `factor`, high ones stay, and those between are interpolated.
fn llama3(frequency: f64, factor: f64, low: f64, high: f64, trained: f64) -> f64 {
    let wavelength = 2.0 * std::f64::consts::PI / frequency;
    if wavelength < trained / high {
        frequency
    } else if wavelength > trained / low {
        frequency / factor
    } else {
        let smooth = (trained / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(changes: Value) -> Vec<u8> {
        let mut config = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 10,
            "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 2
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        serde_json::to_vec(&config).unwrap()
    }

    fn fault(changes: Value) -> String {
        Architecture::from_json(&config(changes), None)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn defaults_are_filled_in() {
        let found = Architecture::from_json(&config(serde_json::json!({})), None).unwrap();
        assert_eq!(
            (found.kv_heads, found.head_dim, found.tied_head),
            (2, 4, false)
        );
        assert_eq!(found.rope_frequencies, [1.0, 0.01]);
        assert_eq!(found.eos_token_ids, [2]);
        let generation = br#"{"eos_token_id": [3, 4]}"#;
        let found =
            Architecture::from_json(&config(serde_json::json!({})), Some(generation)).unwrap();
        assert_eq!(found.eos_token_ids, [3, 4]);
    }

    #[test]
    fn other_networks_are_refused_by_name() {
        // The names have to agree.
        assert!(
            fault(serde_json::json!({"model_type": "qwen2"}))
                .contains("\"qwen2\" ([\"Qwen2ForCausalLM\"])")
        );
        assert!(
            fault(serde_json::json!({"use_sliding_window": true})).contains("use_sliding_window")
        );
        let types = serde_json::json!({"layer_types": ["full_attention", "sliding_attention"]});
        assert!(fault(types).contains("layer_types"));
        assert!(
            fault(serde_json::json!({"hidden_act": "gelu"})).contains("hidden_act is \"gelu\"")
        );
        assert!(fault(serde_json::json!({"attention_bias": true})).contains("attention_bias"));
        assert!(fault(serde_json::json!({"rope_scaling": {"type": "yarn"}})).contains("yarn"));
        assert!(
            fault(serde_json::json!({"quantization_config": {}})).contains("quantization_config")
        );
        assert!(
            fault(serde_json::json!({"num_key_value_heads": 0}))
                .contains("num_key_value_heads is 0")
        );
        assert!(
            fault(serde_json::json!({"num_attention_heads": 3})).contains("head_dim is missing")
        );
        assert!(fault(serde_json::json!({"head_dim": 3})).contains("even"));
        assert!(fault(serde_json::json!({"hidden_size": "8"})).contains("config.json"));
        assert!(
            fault(serde_json::json!({"eos_token_id": 10})).contains("must be below vocab_size")
        );
    }

    #[test]
    fn kinds_have_a_bias_or_norms_of_their_own() {
        for (of, name, expected) in [
            ("llama", "LlamaForCausalLM", (false, false)),
            ("qwen2", "Qwen2ForCausalLM", (true, false)),
            ("qwen3", "Qwen3ForCausalLM", (false, true)),
        ] {
            let named = serde_json::json!({"model_type": of, "architectures": [name]});
            let found = Architecture::from_json(&config(named), None).unwrap();
            assert_eq!((found.qkv_bias, found.head_norms), expected, "{of}");
        }
    }

    #[test]
    fn linear_scaling_slows_all_turns() {
        let scaling = serde_json::json!({"rope_scaling": {"type": "linear", "factor": 4.0}});
        let found = Architecture::from_json(&config(scaling), None).unwrap();
        assert_eq!(found.rope_frequencies, [0.25, 0.0025]);
        let without = serde_json::json!({"rope_scaling": {"type": "linear"}});
        assert!(fault(without).contains("positive factor"));
    }

    #[test]
    fn llama3_scaling_slows_only_slow_turns() {
        let scaling = serde_json::json!({"rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 100}, "head_dim": 4});
        let found = Architecture::from_json(&config(scaling), None).unwrap();
        assert_eq!(found.rope_frequencies[0], 1.0);
        assert_eq!(found.rope_frequencies[1], 0.01 / 8.0);
    }
}
