//! Loads a model, and computes the passes of the engine.

use std::io::{IsTerminal, Write, stderr};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use parking_lot::Mutex;
use refrain_tokenization::{ModelFiles, Tokenizer};

use super::binding::{Context, ContextSizes, Model, accelerators};
use super::sequences::Sequences;
use crate::backend::{Backend, BackendModel, BackendPart, SequenceId};
use crate::config::EngineConfig;
use crate::model::end_tokens;

/// A text with what tokenizers split in different ways: words, numbers, spaces, scripts, and marks.
const CANARY: &str = "Hello, world! It's 3.14159 and 2024-10-31.\n\n  def f(x):\n\t\treturn x['key'] + \"é\" -- Grüße \
                      \u{4f60}\u{597d} \u{1f642}\u{1f468}\u{200d}\u{1f469} \u{e28}\u{e38}   end <b>100000</b> We'LL\r\n{}";

/// Loads a file.
///
/// # Errors
/// As [`super::load`].
pub(super) fn load(path: &str, config: &EngineConfig) -> anyhow::Result<BackendModel> {
    let started = Instant::now();
    let files = ModelFiles::from_gguf(path)?;
    let model = load_model(path, config)?;
    if let Some(fault) = model.fault() {
        anyhow::bail!("{path}: drafts cannot be verified with this model, since {fault}");
    }
    compare_tokenizers(path, &files.tokenizer()?, &model)?;
    let (vocab_size, trained) = (model.vocab_size(), model.trained_context());
    let eos_token_ids = end_tokens(files.generation_config_json.as_deref())?;
    let room = u32::try_from(config.kv_tokens_max).unwrap_or(u32::MAX);
    let sizes = ContextSizes {
        // Drafts lie beside the texts, for as long as a step takes.
        tokens: room.saturating_add(config.max_step_tokens),
        rows: config.max_step_tokens,
        threads: u32::try_from(config.threads).unwrap_or(u32::MAX),
    };
    let sequences = model.sequences_max();
    let context = Context::new(Arc::new(model), sizes)?;
    tracing::info!(
        model = path,
        accelerators = accelerators().join(", "),
        threads = config.threads,
        kv_tokens = room,
        seconds = started.elapsed().as_secs_f64(),
        "model loaded into llama.cpp"
    );
    let name = Path::new(path).file_stem().unwrap_or("model".as_ref());
    Ok(BackendModel {
        backend: Arc::new(LlamaBackend(Mutex::new(Parts {
            sequences: Sequences::new(sequences),
            context,
        }))),
        name: name.to_string_lossy().into_owned(),
        files,
        vocab_size,
        max_context: trained.min(room),
        // The other half is for the branches of drafts.
        sessions_max: sequences / 2,
        eos_token_ids: eos_token_ids.unwrap_or_default(),
    })
}

/// Loads a file. A terminal shows how far it is.
fn load_model(path: &str, config: &EngineConfig) -> anyhow::Result<Model> {
    let mut shown = 0;
    let is_terminal = stderr().is_terminal();
    let mut told = |share: f32| {
        let percent = (share * 100.0) as u32;
        if is_terminal && percent > shown {
            shown = percent;
            let end = if percent >= 100 { "\n" } else { "" };
            let _ = write!(stderr(), "\rLoading {path}: {percent} %{end}");
        }
    };
    Model::load(path, config.gpu_layers, &mut told)
}

/// Checks that the tokenizer of the gateway and that of the model agree, since texts would be misread otherwise.
fn compare_tokenizers(path: &str, own: &Tokenizer, model: &Model) -> anyhow::Result<()> {
    let (own, theirs) = (own.encode(CANARY)?, model.tokenize(CANARY));
    let same = own
        .iter()
        .zip(&theirs)
        .take_while(|(own, theirs)| own == theirs)
        .count();
    ensure!(
        own == theirs,
        "{path}: its text would be split into other tokens than llama.cpp's, from token {same} of a sample on ({:?} \
         instead of {:?}), so this model cannot be served; put Refrain in front of llama-server instead",
        own.get(same),
        theirs.get(same)
    );
    Ok(())
}

/// A context of llama.cpp, and who uses which of its sequences.
#[derive(Debug)]
struct LlamaBackend(Mutex<Parts>);

#[derive(Debug)]
struct Parts {
    sequences: Sequences,
    context: Context,
}

impl Backend for LlamaBackend {
    fn free(&self) -> usize {
        self.0.lock().sequences.free()
    }

    fn open(&self) -> Option<SequenceId> {
        self.0.lock().sequences.open()
    }

    fn fork(&self, sequence: SequenceId, len: usize) -> Option<SequenceId> {
        let parts = &mut *self.0.lock();
        parts.sequences.fork(sequence, len, &mut parts.context)
    }

    fn truncate(&self, sequence: SequenceId, len: usize) {
        let parts = &mut *self.0.lock();
        parts.sequences.truncate(sequence, len, &mut parts.context);
    }

    fn accept(&self, sequence: SequenceId, nodes: &[usize]) {
        let parts = &mut *self.0.lock();
        parts.sequences.accept(sequence, nodes, &mut parts.context);
    }

    fn close(&self, sequence: SequenceId) {
        let parts = &mut *self.0.lock();
        parts.sequences.close(sequence, &mut parts.context);
    }

    fn compute(&self, wanted: &[BackendPart<'_>]) -> Result<Vec<f32>, String> {
        let parts = &mut *self.0.lock();
        let mut rows = Vec::new();
        for part in wanted {
            rows.extend(parts.sequences.place(part, &mut parts.context)?);
        }
        let mut logits = Vec::new();
        parts.context.compute(&rows, &mut logits)?;
        Ok(logits)
    }
}
