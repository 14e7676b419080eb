//! The engines of `refrain up`: the one of the usual sections, or several under `[[engines]]`.

use std::path::Path;

use refrain_gateway::ModelConfig;
use refrain_reference_engine::{EngineConfig, is_gguf};
use refrain_service_kit::config::is_http_url;
use refrain_worker::{ApiKey, EngineKind, WorkerConfig};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::model_files::BUILTIN;

/// One of several engines of `refrain up`. Without any, `[engine]`, or `[worker.engine]` with `urls.engine`, is the
/// only one.
// The keys that `worker.engine` has as well are listed again: of a flattened section, unknown keys are not found.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UpEngine {
    /// Kind of engine. One of the kind `refrain` runs in this process, unless it has a URL.
    pub kind: EngineKind,
    /// Its base URL. `/v1` at the end of a third-party engine's URL is left out.
    pub url: String,
    /// Public name of its model. Empty: that of its file or folder. The gateway serves it, with the files below,
    /// unless `gateway.models` names it.
    pub model: String,
    /// Name of the model at the engine; empty: the same.
    pub served_model: String,
    /// The model: for an engine in this process a GGUF file, a folder with weights, or `builtin:` and a name; for
    /// others a folder with its `tokenizer.json`.
    pub files: String,
    /// For an engine in this process: a smaller model of the same tokenizer, which drafts where nothing is
    /// remembered.
    pub draft_model: Option<String>,
    /// The engine's own key, if it wants one.
    pub api_key: Option<ApiKey>,
    /// Longest text, tokens. It can only lower the engine's own limit.
    pub max_context: Option<u32>,
    /// For an engine in this process: tokens of keys and values of all texts. Default: half of what the weights leave
    /// of the memory, and no more than `engine.kv_tokens_max`.
    pub kv_tokens_max: Option<u64>,
}

impl UpEngine {
    /// Whether it runs in this process.
    pub(crate) fn is_here(&self) -> bool {
        self.kind == EngineKind::Refrain && self.url.is_empty()
    }

    /// The public name of its model.
    pub(crate) fn name(&self) -> String {
        if !self.model.is_empty() {
            return self.model.clone();
        }
        if let Some(name) = self.files.strip_prefix(BUILTIN) {
            return name.to_owned();
        }
        let path = Path::new(&self.files);
        let name = match is_gguf(&self.files) {
            true => path.file_stem(),
            false => path.file_name(),
        };
        name.unwrap_or("model".as_ref())
            .to_string_lossy()
            .into_owned()
    }

    fn faults(&self) -> impl Iterator<Item = &'static str> + use<> {
        let is_elsewhere = !self.is_here();
        let faults = [
            (
                self.files.is_empty(),
                "files: name the model's file or folder",
            ),
            (
                is_elsewhere && self.model.is_empty(),
                "model: must be the public name of the engine's model",
            ),
            (
                is_elsewhere && !is_http_url(&self.url),
                "url: must be an http:// or https:// URL",
            ),
            (
                is_elsewhere && (self.draft_model.is_some() || self.kv_tokens_max.is_some()),
                "draft_model, kv_tokens_max: leave them out, since this engine is not in this process",
            ),
        ];
        let faults = faults.into_iter().filter(|(is_fault, _)| *is_fault);
        faults.map(|(_, fault)| fault)
    }
}

/// An engine of `refrain up`, and the worker before it.
pub(crate) struct EngineParts {
    pub(crate) worker: WorkerConfig,
    /// Where the engine is; `None`: it is one of these settings, in this process.
    pub(crate) url: Option<String>,
    pub(crate) engine: EngineConfig,
}

/// The engines of `refrain up`, at least one, unless engines register later. `worker`, `engine` and `url` are those
/// of the usual sections.
pub(crate) fn engine_parts(
    engines: &[UpEngine],
    worker: &WorkerConfig,
    engine: &EngineConfig,
    url: &str,
) -> Vec<EngineParts> {
    if worker.adoption.is_on() {
        return Vec::new();
    }
    if engines.is_empty() {
        let is_elsewhere = worker.engine.is_external();
        return vec![EngineParts {
            worker: worker.clone(),
            url: is_elsewhere.then(|| url.to_owned()),
            engine: engine.clone(),
        }];
    }
    let parts = engines.iter().enumerate();
    let parts = parts.map(|(nth, of)| parts_of(nth, of, worker.clone(), engine.clone()));
    parts.collect()
}

fn parts_of(
    nth: usize,
    of: &UpEngine,
    mut worker: WorkerConfig,
    mut engine: EngineConfig,
) -> EngineParts {
    if nth > 0 {
        // Leases go to the worker of their URL.
        worker.id = format!("{}-{nth}", worker.id);
        worker.advertise_url = format!("{}{nth}", worker.advertise_url);
    }
    if of.is_here() {
        engine.model.clone_from(&of.files);
        engine.model_name = Some(of.name());
        engine.draft_model.clone_from(&of.draft_model);
        engine.max_context = of.max_context.or(engine.max_context);
        engine.kv_tokens_max = of.kv_tokens_max.unwrap_or(engine.kv_tokens_max);
    } else {
        let at = &mut worker.engine;
        at.kind = of.kind;
        at.model.clone_from(&of.model);
        at.served_model.clone_from(&of.served_model);
        at.files.clone_from(&of.files);
        at.api_key.clone_from(&of.api_key);
        at.max_context = of.max_context;
    }
    EngineParts {
        worker,
        url: (!of.is_here()).then(|| of.url.clone()),
        engine,
    }
}

/// Has the gateway serve the models of engines that it does not know.
pub(crate) fn add_models(engines: &[UpEngine], models: &mut Vec<ModelConfig>) {
    for engine in engines {
        let id = engine.name();
        if models.iter().all(|model| model.id != id) {
            models.push(ModelConfig {
                id,
                files: engine.files.clone(),
                max_context: engine.max_context,
                text_only: engine.kind == EngineKind::Openai,
                ..ModelConfig::default()
            });
        }
    }
}

/// The faults of `[[engines]]`, beside a worker's section and `urls.engine`.
pub(crate) fn engine_faults(engines: &[UpEngine], worker: &WorkerConfig, url: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (nth, engine) in engines.iter().enumerate() {
        let of_engine = engine.faults();
        faults.extend(of_engine.map(|fault| format!("engines[{nth}].{fault}")));
    }
    let beside = [
        (
            worker.engine.is_external() || !url.is_empty(),
            "worker.engine, urls.engine: leave them out, since [[engines]] names the engines",
        ),
        (
            worker.adoption.is_on(),
            "worker.adoption: leave it out, since [[engines]] names the engines",
        ),
        (
            worker.listen.is_some() && engines.len() > 1,
            "worker.listen: leave it out, since several workers cannot share an address",
        ),
    ];
    let beside = beside
        .into_iter()
        .filter(|(is_fault, _)| *is_fault && !engines.is_empty());
    faults.extend(beside.map(|(_, fault)| fault.to_owned()));
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sections that say which engines there are.
    #[derive(Deserialize)]
    #[serde(default)]
    struct Sections {
        worker: WorkerConfig,
        engines: Vec<UpEngine>,
    }

    impl Default for Sections {
        fn default() -> Self {
            Sections {
                worker: WorkerConfig {
                    advertise_url: "local:".into(),
                    ..WorkerConfig::default()
                },
                engines: Vec::new(),
            }
        }
    }

    impl Sections {
        fn parts(&self, url: &str) -> Vec<EngineParts> {
            engine_parts(&self.engines, &self.worker, &EngineConfig::default(), url)
        }

        fn faults(&self, url: &str) -> String {
            engine_faults(&self.engines, &self.worker, url).join("\n")
        }
    }

    fn read(toml: &str) -> Sections {
        toml::from_str(toml).unwrap()
    }

    #[test]
    fn without_a_list_the_usual_sections_name_the_only_engine() {
        let parts = read("").parts("");
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].url, None);
        let elsewhere = read("[worker.engine]\nkind = \"vllm\"").parts("http://a");
        assert_eq!(elsewhere[0].url.as_deref(), Some("http://a"));
        let adopts = read("[worker.adoption]\nengines_max = 1");
        assert!(adopts.parts("").is_empty());
    }

    #[test]
    fn each_engine_of_a_list_has_a_worker_and_a_model() {
        let two = "kind = \"vllm\"\nmodel = \"two\"\nfiles = \"/models/two\"";
        let sections = read(&format!(
            "[[engines]]\nfiles = \"/models/one.gguf\"\nmax_context = 512\n\
             [[engines]]\nurl = \"http://a\"\n{two}\n[[engines]]\nurl = \"http://b\"\n{two}"
        ));
        assert_eq!(sections.faults(""), "");
        let mut models = Vec::new();
        add_models(&sections.engines, &mut models);
        let models = models.iter().map(|model| model.id.as_str());
        assert_eq!(models.collect::<Vec<_>>(), ["one", "two"]);
        let parts = sections.parts("");
        let ids = parts.iter().map(|part| part.worker.id.as_str());
        assert_eq!(
            ids.collect::<Vec<_>>(),
            ["worker-0", "worker-0-1", "worker-0-2"]
        );
        let places = parts.iter().map(|part| part.worker.advertise_url.as_str());
        assert_eq!(places.collect::<Vec<_>>(), ["local:", "local:1", "local:2"]);
        let urls = parts.iter().map(|part| part.url.as_deref());
        assert_eq!(
            urls.collect::<Vec<_>>(),
            [None, Some("http://a"), Some("http://b")]
        );
        assert_eq!(parts[0].engine.max_context, Some(512));
        assert_eq!(parts[0].engine.model_name.as_deref(), Some("one"));
        assert_eq!(parts[2].worker.engine.model, "two");
    }

    #[test]
    fn faults_name_the_engine_and_the_key() {
        let one = "[[engines]]\nfiles = \"builtin:refrain-tiny\"\n";
        assert_eq!(read(one).faults(""), "");
        assert!(
            read(&format!("{one}[[engines]]\n"))
                .faults("")
                .contains("engines[1].files")
        );
        let elsewhere = "[[engines]]\nkind = \"sglang\"\nfiles = \"a\"\nkv_tokens_max = 9";
        let elsewhere = read(&format!("{one}{elsewhere}")).faults("");
        for key in [
            "engines[1].model",
            "engines[1].url",
            "engines[1].draft_model",
        ] {
            assert!(elsewhere.contains(key), "{key}: {elsewhere}");
        }
        assert!(read(one).faults("http://a").contains("urls.engine"));
        let adopts = read(&format!("{one}[worker.adoption]\nengines_max = 1"));
        assert!(adopts.faults("").contains("worker.adoption"));
    }
}
