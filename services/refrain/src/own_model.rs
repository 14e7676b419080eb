//! `refrain up --model`: the caller's own models on engines of this process, which share its memory.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use refrain_reference_engine::{
    CPU, EngineConfig, ModelFiles, ModelMemory, WeightFormat, check_llama, is_gguf, llama_devices,
};
use refrain_tokenization::GgufHeader;

use crate::config::MeshFile;
use crate::model_files::BUILTIN;
use crate::up_engines::UpEngine;

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
    /// Face's layout with a small Llama, Qwen2 or Qwen3 network, which runs on the CPU. Repeat it for several models.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["cluster", "adopt"])]
    model: Vec<PathBuf>,
    /// Longest text of these models, tokens [default: what the model and the memory allow].
    #[arg(long, value_name = "TOKENS", requires = "model", value_parser = clap::value_parser!(u32).range(16..))]
    context: Option<u32>,
    /// A smaller model of the same tokenizer, of either kind, which drafts where nothing is remembered.
    #[arg(long, value_name = "PATH", requires = "model")]
    draft_model: Option<PathBuf>,
}

impl OwnModelArgs {
    /// Has the mesh serve these models, and divides the memory among all that run in this process. Returns what is
    /// said of them while they load.
    ///
    /// # Errors
    /// A folder without a model, a network that the engine does not compute, or too little memory.
    pub(crate) fn apply(&self, file: &mut MeshFile) -> anyhow::Result<Vec<String>> {
        if !self.model.is_empty() {
            self.add(file)?;
        }
        divide_memory(&mut file.engines, &mut file.engine)
    }

    fn add(&self, file: &mut MeshFile) -> anyhow::Result<()> {
        ensure!(
            !file.worker.engine.is_external() && file.engines.is_empty(),
            "--model: leave out [worker.engine] and [[engines]] of the configuration, which name other engines"
        );
        ensure!(
            file.gateway.models.is_empty(),
            "--model: leave out [[gateway.models]] of the configuration, or name the folder there and in engine.model"
        );
        ensure!(
            self.draft_model.is_none() || self.model.len() == 1,
            "--draft-model: name one --model, or give each of [[engines]] in a configuration file its draft_model"
        );
        // All bits are the same in both formats, and this one halves what a step reads.
        file.engine.weights = WeightFormat::Bf16;
        let draft_model = self.draft_model.as_ref();
        let draft_model = draft_model.map(|path| source_of("--draft-model", path));
        let draft_model = draft_model.transpose()?;
        for path in &self.model {
            let engine = UpEngine {
                files: source_of("--model", path)?,
                draft_model: draft_model.clone(),
                max_context: self.context,
                ..UpEngine::default()
            };
            let same = file.engines.iter().find(|of| of.name() == engine.name());
            if let Some(same) = same {
                bail!(
                    "--model: {} and {} have the same name; name them in [[engines]] of a configuration file",
                    same.files,
                    engine.files
                );
            }
            file.engines.push(engine);
        }
        Ok(())
    }
}

/// Sets the lengths of texts and the keys and values of the engines in this process. Returns what is said of each
/// while it loads.
fn divide_memory(
    engines: &mut [UpEngine],
    common: &mut EngineConfig,
) -> anyhow::Result<Vec<String>> {
    let is_own = |engine: &UpEngine| engine.is_here() && !engine.files.starts_with(BUILTIN);
    let mut models = Vec::new();
    for engine in engines.iter_mut().filter(|of| is_own(of)) {
        let model = memory_of(&engine.files, common.weights)
            .with_context(|| format!("the model {}", engine.name()))?;
        let draft_model = engine.draft_model.as_ref();
        let draft_model = draft_model.map(|source| memory_of(source, common.weights));
        let draft_model = draft_model.transpose().context("its draft model")?;
        let is_on_device = is_gguf(&engine.files) && common.gpu_layers != Some(0);
        let devices = match is_on_device {
            true => llama_devices(),
            false => CPU.to_owned(),
        };
        models.push((
            engine,
            Needs::new(model, draft_model),
            model.max_context,
            devices,
        ));
    }
    if models.is_empty() {
        return Ok(Vec::new());
    }
    if common.threads == EngineConfig::default().threads {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        common.threads = cores.min(THREADS_MAX);
    }
    // An accelerator has a memory of its own, of which llama.cpp says whether it suffices.
    let needs = models.iter().filter(|(.., devices)| devices == CPU);
    let needs: Vec<Needs> = needs.map(|(_, needs, ..)| *needs).collect();
    let plan = Plan::new(&needs, available_bytes())?;
    let mut said = Vec::new();
    for (engine, needs, model_max, devices) in models {
        let most = engine.kv_tokens_max.unwrap_or(common.kv_tokens_max);
        let kv_tokens = match devices == CPU {
            true => plan.kv_tokens(&needs, most),
            false => most,
        };
        let context = engine.max_context.unwrap_or(model_max).min(model_max);
        let context = context.min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
        engine.kv_tokens_max = Some(kv_tokens);
        engine.max_context = Some(context);
        said.push(format!(
            "Loading {}: {} of weights on {devices}, {} threads, {kv_tokens} tokens of keys and values ({}), texts of \
             up to {context} tokens",
            engine.name(),
            gigabytes(needs.weights_bytes),
            common.threads,
            gigabytes(kv_tokens * needs.kv_bytes_per_token),
        ));
    }
    Ok(said)
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

/// The memory that an engine takes.
#[derive(Clone, Copy, Debug)]
struct Needs {
    weights_bytes: u64,
    /// Bytes beside the weights, while they are loaded.
    loading_bytes: u64,
    kv_bytes_per_token: u64,
}

impl Needs {
    fn new(model: ModelMemory, draft_model: Option<ModelMemory>) -> Self {
        let all = [Some(model), draft_model];
        let sum = |of: fn(&ModelMemory) -> u64| all.iter().flatten().map(of).sum::<u64>();
        Needs {
            weights_bytes: sum(|of| of.weights_bytes),
            // One model is loaded after the other.
            loading_bytes: all
                .iter()
                .flatten()
                .map(|of| of.files_bytes)
                .max()
                .unwrap_or(0),
            kv_bytes_per_token: sum(|of| of.kv_bytes_per_token),
        }
    }
}

/// How the memory of this machine is divided among engines.
#[derive(Debug)]
struct Plan {
    /// For the keys and values of each engine; `None`: it is not known.
    kv_bytes: Option<u64>,
}

impl Plan {
    /// Each engine gets an equal part of half of what all weights leave.
    fn new(engines: &[Needs], available_bytes: Option<u64>) -> anyhow::Result<Self> {
        let Some(available) = available_bytes.filter(|_| !engines.is_empty()) else {
            return Ok(Plan { kv_bytes: None });
        };
        let count = engines.len() as u64;
        let weights: u64 = engines.iter().map(|of| of.weights_bytes).sum();
        let loading = engines.iter().map(|of| of.loading_bytes).max();
        let least = engines
            .iter()
            .map(|of| KV_TOKENS_MIN * of.kv_bytes_per_token);
        let short_texts = 2 * count * least.max().unwrap_or(0);
        let needed = weights + loading.unwrap_or(0).max(short_texts);
        ensure!(
            needed <= available,
            "the models need {} of memory ({} of weights, and then what it takes to load them and for short texts), and \
             {} are free; take fewer or smaller models",
            gigabytes(needed),
            gigabytes(weights),
            gigabytes(available)
        );
        let kv_bytes = (available - weights) / 2 / count;
        Ok(Plan {
            kv_bytes: Some(kv_bytes),
        })
    }

    /// Tokens of keys and values of an engine, at most `most`.
    fn kv_tokens(&self, engine: &Needs, most: u64) -> u64 {
        let room = |bytes: u64| bytes / engine.kv_bytes_per_token.max(1);
        self.kv_bytes.map_or(most, |bytes| most.min(room(bytes)))
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
    use refrain_gateway::ModelConfig;

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
        let one = Needs::new(model(1, 100_000), None);
        let tokens = |engines: &[Needs], available| {
            let plan = Plan::new(engines, Some(available)).unwrap();
            plan.kv_tokens(&one, 65_536)
        };
        assert_eq!(tokens(&[one], 100_000_000_000), 65_536);
        assert_eq!(tokens(&[one], 3_000_000_000), 10_000);
        assert_eq!(tokens(&[one, one], 6_000_000_000), 10_000);
        let fault = Plan::new(&[one], Some(1_900_000_000)).unwrap_err();
        assert!(fault.to_string().contains("need 2.0 GB"), "{fault}");
        assert!(Plan::new(&[one, one], Some(2_900_000_000)).is_err());
        let unknown = Plan::new(&[one], None).unwrap();
        assert_eq!(unknown.kv_tokens(&one, 65_536), 65_536);
    }

    #[test]
    fn a_draft_model_counts() {
        let both = Needs::new(model(2, 100_000), Some(model(1, 50_000)));
        assert_eq!(
            (both.weights_bytes, both.loading_bytes),
            (3_000_000_000, 2_000_000_000)
        );
        let plan = Plan::new(&[both], Some(6_000_000_000)).unwrap();
        assert_eq!(plan.kv_tokens(&both, 65_536), 10_000);
    }

    #[test]
    fn paths_without_a_model_are_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, "GGUF").unwrap();
        let apply = |model: PathBuf| {
            let args = OwnModelArgs {
                model: vec![model],
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
            model: vec![folder.path().to_owned()],
            context: None,
            draft_model: None,
        };
        let mut file = MeshFile::default();
        file.gateway.models.push(ModelConfig::default());
        let fault = args.apply(&mut file).unwrap_err().to_string();
        assert!(fault.contains("[[gateway.models]]"), "{fault}");
    }
}
