//! `refrain up --model`: the caller's own model on the engine of this process.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use refrain_gateway::ModelConfig;
use refrain_reference_engine::{
    CPU, EngineConfig, ModelFiles, ModelMemory, WeightFormat, check_llama, is_gguf, llama_devices,
};
use refrain_tokenization::GgufHeader;

use crate::config::MeshFile;

/// Most threads that share the products of a step: beyond so many, waiting for each other takes longer than it saves.
const THREADS_MAX: usize = 16;
/// Size of a key's or value's element in llama.cpp, which has 16 bits.
const KV_VALUE_BYTES: u64 = 2;
/// Size of the logits of a token of the vocabulary, in all of llama.cpp's sequences.
const LOGIT_ROWS_BYTES: u64 = 256 * 4;
/// Fewest tokens of keys and values with which a model is of any use.
const KV_TOKENS_MIN: u64 = 1_024;

/// The arguments about the caller's own model.
#[derive(Args)]
pub(crate) struct OwnModelArgs {
    /// Serve this model in place of the built-in one: a GGUF file, which llama.cpp computes, or a folder in Hugging
    /// Face's layout with a small Llama, Qwen2 or Qwen3 network, which runs on the CPU.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["cluster", "adopt"])]
    model: Option<PathBuf>,
    /// Longest text of that model, tokens [default: what the model and the memory allow].
    #[arg(long, value_name = "TOKENS", requires = "model", value_parser = clap::value_parser!(u32).range(16..))]
    context: Option<u32>,
    /// A smaller model of the same tokenizer, of either kind, which drafts where nothing is remembered.
    #[arg(long, value_name = "PATH", requires = "model")]
    draft_model: Option<PathBuf>,
}

impl OwnModelArgs {
    /// Has the mesh serve the model, if one is named. Returns what is said of it while it loads.
    ///
    /// # Errors
    /// A folder without a model, a network that the engine does not compute, or too little memory.
    pub(crate) fn apply(&self, file: &mut MeshFile) -> anyhow::Result<Option<String>> {
        let Some(folder) = &self.model else {
            return Ok(None);
        };
        ensure!(
            !file.worker.engine.is_external(),
            "--model: leave out [worker.engine] of the configuration, which names an engine elsewhere"
        );
        ensure!(
            file.gateway.models.is_empty(),
            "--model: leave out [[gateway.models]] of the configuration, or name the folder there and in engine.model"
        );
        let source = source_of("--model", folder)?;
        let name = match is_gguf(&source) {
            true => Path::new(&source).file_stem(),
            false => Path::new(&source).file_name(),
        };
        let name = name.unwrap_or("model".as_ref());
        let name = name.to_string_lossy().into_owned();
        let (engine, default) = (&mut file.engine, EngineConfig::default());
        // All bits are the same in both formats, and this one halves what a step reads.
        engine.weights = WeightFormat::Bf16;
        let memory = memory_of(&source, engine.weights).context("--model")?;
        let draft_model = self.draft_model.as_ref();
        engine.draft_model = draft_model
            .map(|folder| source_of("--draft-model", folder))
            .transpose()?;
        let drafter = engine.draft_model.as_ref();
        let drafter = drafter.map(|source| memory_of(source, engine.weights));
        let drafter = drafter.transpose().context("--draft-model")?;
        let context_max = self.context.unwrap_or(memory.max_context);
        let devices = match is_gguf(&source) && engine.gpu_layers != Some(0) {
            true => llama_devices(),
            false => CPU.to_owned(),
        };
        // An accelerator has a memory of its own, of which llama.cpp says whether it suffices.
        let available = available_bytes().filter(|_| devices == CPU);
        let plan = Plan::new(memory, drafter, available);
        let kv_tokens = plan.kv_tokens(engine.kv_tokens_max)?;
        engine.kv_tokens_max = kv_tokens;
        let context = context_max
            .min(memory.max_context)
            .min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
        engine.max_context = Some(context);
        if engine.threads == default.threads {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            engine.threads = cores.min(THREADS_MAX);
        }
        engine.model = source.clone();
        engine.model_name = Some(name.clone());
        let said = format!(
            "Loading {name}: {} of weights on {}, {} threads, {kv_tokens} tokens of keys and values ({}), texts of up to \
             {context} tokens",
            gigabytes(plan.weights_bytes),
            devices,
            engine.threads,
            gigabytes(kv_tokens * plan.kv_bytes_per_token),
        );
        file.gateway.models = vec![ModelConfig {
            id: name,
            files: source,
            max_context: Some(context),
            ..ModelConfig::default()
        }];
        Ok(Some(said))
    }
}

/// The memory that a model takes.
fn memory_of(source: &str, format: WeightFormat) -> anyhow::Result<ModelMemory> {
    if !is_gguf(source) {
        let files = ModelFiles::open(source)?;
        ensure!(
            files.tokenization.is_some(),
            "{source} has no tokenizer.json"
        );
        return Ok(files.memory(format)?);
    }
    check_llama(source)?;
    let header = GgufHeader::from_path(source)?;
    Ok(ModelMemory {
        // The file is mapped, so it is in memory once. llama.cpp has logits for each of its sequences.
        weights_bytes: header.file_bytes + u64::from(header.vocab_size) * LOGIT_ROWS_BYTES,
        files_bytes: 0,
        kv_bytes_per_token: header.cache_values_per_token() * KV_VALUE_BYTES,
        max_context: header.context_length.unwrap_or(u32::MAX),
    })
}

/// The full path of a model.
fn source_of(argument: &str, folder: &Path) -> anyhow::Result<String> {
    let shown = folder.display();
    if folder.is_file() && !is_gguf(&shown.to_string()) {
        bail!(
            "{argument}: {shown} is a file, and its name does not end in .gguf; name a GGUF file, or a folder with \
             config.json, tokenizer.json and model.safetensors"
        );
    }
    let full = match folder.is_file() {
        // A link has another name than its target, which may lie in a cache.
        true => std::path::absolute(folder),
        false => folder.canonicalize(),
    };
    let full = full.with_context(|| format!("{argument}: {shown} cannot be opened"))?;
    let full = full.into_os_string().into_string();
    full.map_err(|_| anyhow::anyhow!("{argument}: the path {shown} is no UTF-8"))
}

/// How the memory of this machine is divided.
struct Plan {
    weights_bytes: u64,
    loading_bytes: u64,
    kv_bytes_per_token: u64,
    /// `None`: it is not known.
    available_bytes: Option<u64>,
}

impl Plan {
    fn new(model: ModelMemory, drafter: Option<ModelMemory>, available_bytes: Option<u64>) -> Self {
        let all = [Some(model), drafter];
        let sum = |of: fn(&ModelMemory) -> u64| all.iter().flatten().map(of).sum::<u64>();
        let files = all.iter().flatten().map(|of| of.files_bytes).max();
        Plan {
            weights_bytes: sum(|of| of.weights_bytes),
            // One model is loaded after the other.
            loading_bytes: files.unwrap_or(0),
            kv_bytes_per_token: sum(|of| of.kv_bytes_per_token),
            available_bytes,
        }
    }

    /// Tokens of keys and values, at most `most`: they get half of what the weights leave.
    fn kv_tokens(&self, most: u64) -> anyhow::Result<u64> {
        let Some(available) = self.available_bytes else {
            return Ok(most);
        };
        let least = KV_TOKENS_MIN * self.kv_bytes_per_token;
        let needed = self.weights_bytes + self.loading_bytes.max(2 * least);
        ensure!(
            needed <= available,
            "--model: it needs {} of memory ({} of weights, and then what it takes to load them and for short texts), and \
             {} are free; take a smaller model",
            gigabytes(needed),
            gigabytes(self.weights_bytes),
            gigabytes(available)
        );
        let left = (available - self.weights_bytes) / 2;
        Ok(most.min(left / self.kv_bytes_per_token.max(1)))
    }
}

/// The memory that is free for this process, by the system; `None` where it does not say.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

fn gigabytes(bytes: u64) -> String {
    match bytes < 100_000_000 {
        true => format!("{} MB", bytes / 1_000_000),
        false => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(weights_gb: u64, kv_bytes_per_token: u64) -> ModelMemory {
        ModelMemory {
            weights_bytes: weights_gb * 1_000_000_000,
            files_bytes: weights_gb * 1_000_000_000,
            kv_bytes_per_token,
            max_context: 32_768,
        }
    }

    #[test]
    fn keys_and_values_get_half_of_what_the_weights_leave() {
        let plan = |available| Plan::new(model(1, 100_000), None, Some(available));
        assert_eq!(plan(100_000_000_000).kv_tokens(65_536).unwrap(), 65_536);
        assert_eq!(plan(3_000_000_000).kv_tokens(65_536).unwrap(), 10_000);
        let fault = plan(1_900_000_000).kv_tokens(65_536).unwrap_err();
        assert!(fault.to_string().contains("needs 2.0 GB"), "{fault}");
        let unknown = Plan::new(model(1, 100_000), None, None);
        assert_eq!(unknown.kv_tokens(65_536).unwrap(), 65_536);
    }

    #[test]
    fn a_draft_model_counts() {
        let plan = Plan::new(
            model(2, 100_000),
            Some(model(1, 50_000)),
            Some(6_000_000_000),
        );
        assert_eq!(
            (plan.weights_bytes, plan.loading_bytes),
            (3_000_000_000, 2_000_000_000)
        );
        assert_eq!(plan.kv_tokens(65_536).unwrap(), 10_000);
    }

    #[test]
    fn paths_without_a_model_are_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, "GGUF").unwrap();
        let apply = |model: PathBuf| {
            let args = OwnModelArgs {
                model: Some(model),
                context: None,
                draft_model: None,
            };
            let fault = args.apply(&mut MeshFile::default()).unwrap_err();
            format!("{fault:#}")
        };
        assert!(apply(file).contains("model.gguf: "));
        let other = folder.path().join("model.bin");
        std::fs::write(&other, "GGUF").unwrap();
        assert!(apply(other).contains("does not end in .gguf"));
        assert!(apply(folder.path().join("absent")).contains("cannot be opened"));
        assert!(apply(folder.path().to_owned()).contains("config.json"));
        let args = OwnModelArgs {
            model: Some(folder.path().to_owned()),
            context: None,
            draft_model: None,
        };
        let mut file = MeshFile::default();
        file.gateway.models.push(ModelConfig::default());
        let fault = args.apply(&mut file).unwrap_err().to_string();
        assert!(fault.contains("[[gateway.models]]"), "{fault}");
    }
}
