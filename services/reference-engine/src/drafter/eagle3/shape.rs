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
        let json: HeadJson = serde_json::from_slice(config)?;
        let flag = |get: fn(&Flags) -> Option<bool>| get(&json.flags).or(get(&json.eagle_config));
        let refuse = |found: Option<bool>, refused: bool, key: &str, supported: &str| {
            ModelError::unless_supported(found != Some(refused), key, refused, supported)
        };
        let found = flag(|flags| flags.fc_norm);
        refuse(found, true, "fc_norm", "heads without a norm around fc")?;
        let found = flag(|flags| flags.norm_output);
        let supported = "heads that read their outputs without a norm";
        refuse(found, true, "norm_output", supported)?;
        let found = flag(|flags| flags.use_aux_hidden_state);
        let supported = "heads that read hidden states of several layers";
        refuse(found, false, "use_aux_hidden_state", supported)?;
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
            ModelError::unless(found == expected, || {
                format!("{key} is {found}; the target's is {expected}")
            })?;
        }
        let vocab = architecture.vocab_size;
        let draft_vocab = json.draft_vocab_size.unwrap_or(vocab);
        ModelError::unless((1..=vocab).contains(&draft_vocab), || {
            format!("draft_vocab_size is {draft_vocab}; it must be from 1 to vocab_size, {vocab}")
        })?;
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
    ModelError::unless(!ids.is_empty(), || format!("{KEY} names no layer"))?;
    for id in &ids {
        ModelError::unless(*id < layers, || {
            format!(
                "{KEY} names layer {id}; the target's are 0 to {}",
                layers - 1
            )
        })?;
    }
    Ok(ids)
}
