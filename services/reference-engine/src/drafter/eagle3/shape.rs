//! The shape of a head, read from its `config.json` and checked against the target.

use serde::Deserialize;

use crate::model::{Architecture, ModelError};

/// The shape of a head that fits its target.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HeadShape {
    /// Shape of its one layer.
    pub(crate) architecture: Architecture,
    /// Number of tokens that it can guess.
    pub(crate) draft_vocab: usize,
    /// Indices of the target's layers whose outputs it reads, in the order of reading.
    pub(crate) captured_layers: Vec<usize>,
    /// Whether the layer adds to the output of `hidden_norm` instead of to its input.
    pub(crate) norm_before_residual: bool,
}

/// Keys that a plain Llama does not have.
#[derive(Deserialize)]
struct HeadJson {
    target_hidden_size: Option<usize>,
    draft_vocab_size: Option<usize>,
    #[serde(flatten)]
    flags: Flags,
    #[serde(default)]
    eagle_config: Flags,
}

/// Keys that are at the top level or in `eagle_config`, depending on the tool that wrote the file.
#[derive(Default, Deserialize)]
struct Flags {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    use_aux_hidden_state: Option<bool>,
    norm_before_residual: Option<bool>,
    fc_norm: Option<bool>,
    norm_output: Option<bool>,
}

impl HeadShape {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// Fails for a key that is missing, wrong, or does not fit the target, and for a head of another kind.
    pub(crate) fn from_json(config: &[u8], target: &Architecture) -> Result<Self, ModelError> {
        let architecture = Architecture::of_head(config)?;
        let json: HeadJson = serde_json::from_slice(config)
            .map_err(|error| ModelError::Config(error.to_string()))?;
        let flag = |get: fn(&Flags) -> Option<bool>| get(&json.flags).or(get(&json.eagle_config));
        let unsupported = |key, found: bool, supported| {
            Err(ModelError::Unsupported {
                key,
                found: found.to_string(),
                supported,
            })
        };
        if flag(|flags| flags.fc_norm) == Some(true) {
            return unsupported("fc_norm", true, "heads without a norm around fc");
        }
        if flag(|flags| flags.norm_output) == Some(true) {
            return unsupported(
                "norm_output",
                true,
                "heads that read their outputs without a norm",
            );
        }
        if flag(|flags| flags.use_aux_hidden_state) == Some(false) {
            let supported = "heads that read hidden states of several layers";
            return unsupported("use_aux_hidden_state", false, supported);
        }
        let norm_before_residual = flag(|flags| flags.norm_before_residual).unwrap_or(false);
        let sizes = [
            ("vocab_size", architecture.vocab_size, target.vocab_size),
            (
                "target_hidden_size",
                json.target_hidden_size.unwrap_or(target.hidden_size),
                target.hidden_size,
            ),
        ];
        for (key, found, expected) in sizes {
            if found != expected {
                return Err(ModelError::Config(format!(
                    "{key} is {found}; the target's is {expected}"
                )));
            }
        }
        let draft_vocab = json.draft_vocab_size.unwrap_or(architecture.vocab_size);
        if draft_vocab == 0 || draft_vocab > architecture.vocab_size {
            return Err(ModelError::Config(format!(
                "draft_vocab_size is {draft_vocab}; it must be from 1 to vocab_size, {}",
                architecture.vocab_size
            )));
        }
        let named = json.flags.eagle_aux_hidden_state_layer_ids;
        let named = named.or(json.eagle_config.eagle_aux_hidden_state_layer_ids);
        Ok(HeadShape {
            captured_layers: captured_layers(named, target.layers)?,
            architecture,
            draft_vocab,
            norm_before_residual,
        })
    }
}

/// Returns the layers that the file names, or else those that EAGLE-3's own code reads.
fn captured_layers(named: Option<Vec<usize>>, layers: usize) -> Result<Vec<usize>, ModelError> {
    const KEY: &str = "eagle_aux_hidden_state_layer_ids";
    let ids = match named {
        Some(ids) => ids,
        None if layers >= 5 => vec![1, layers / 2 - 1, layers - 4],
        None => {
            return Err(ModelError::Config(format!(
                "{KEY} is missing, and the target's {layers} layers are too few for the default ones"
            )));
        }
    };
    if ids.is_empty() {
        return Err(ModelError::Config(format!("{KEY} names no layer")));
    }
    if let Some(id) = ids.iter().find(|id| **id >= layers) {
        return Err(ModelError::Config(format!(
            "{KEY} names layer {id}; the target's are 0 to {}",
            layers - 1
        )));
    }
    Ok(ids)
}
