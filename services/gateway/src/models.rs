//! The models on offer: their tokenizers and templates, and the workers that serve them now.

mod config;
mod grammars;
mod known_weights;
mod poll;
mod template;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::Context;
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use refrain_output_parsers::{Detected, ToolParserKind, detect};
use refrain_protocol::error::code;
use refrain_protocol::openai::{ModelCard, ModelList};
use refrain_protocol::scheduling::ServedModel;
use refrain_protocol::{
    ApiError, ErrorKind, Namespace, NamespaceId, SignedNamespace, TenantName, TokenId,
};
use refrain_service_kit::clock;
use refrain_service_kit::mesh::{NAMESPACE_TTL_S, NamespaceSigner};
use refrain_tokenization::{
    ChatInput, ChatTemplate, JsonList, ModelFiles, TEXT_ONLY_PREFIX, Tokenizer,
};

pub use self::config::{BeyondContext, ModelConfig};
pub(crate) use self::grammars::FormModel;
use self::grammars::Grammars;
pub use self::known_weights::KnownWeights;
pub(crate) use self::poll::poll_served;
use self::template::usable_template;

pub(crate) use self::template::template_failed;

/// One model.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) id: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// The identity of the tokenizer in namespaces.
    tokenizer_identity: String,
    pub(crate) template: Option<ChatTemplate>,
    /// How it writes tool calls and reasoning.
    pub(crate) formats: Detected,
    /// Whether its template has a place for tools.
    pub(crate) shows_tools: bool,
    /// Whether its engine speaks only text.
    pub(crate) is_text_only: bool,
    /// Why the template cannot be used. Its model serves text completions only.
    template_fault: Option<String>,
    /// Token ids that end an output: those in the files and those in the configuration.
    pub(crate) stop_token_ids: Vec<TokenId>,
    pub(crate) default_max_tokens: Option<u32>,
    pub(crate) beyond_context: BeyondContext,
    /// Further names.
    also: Vec<String>,
    /// Compiles forms of its outputs.
    pub(crate) grammars: Grammars,
    pub(crate) weights: Arc<KnownWeights>,
    max_context: Option<u32>,
    tenants: Vec<TenantName>,
}

/// Most signed namespaces that are kept of a model. Tenants come from the configuration, but end users do not.
const SIGNED_MAX: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// All models, and the last answer of the scheduler on which of them are served.
pub(crate) struct Models {
    models: Vec<Arc<Model>>,
    created: u64,
    served: RwLock<Vec<ServedModel>>,
    signer: NamespaceSigner,
    /// Signed namespaces by model, and by tenant with its part.
    signed: Mutex<HashMap<String, LruCache<String, Arc<KnownNamespace>>>>,
}

/// A signed namespace, and its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownNamespace {
    pub(crate) signed: SignedNamespace,
    pub(crate) id: NamespaceId,
}

impl From<SignedNamespace> for KnownNamespace {
    fn from(signed: SignedNamespace) -> Self {
        let id = signed.namespace.id();
        KnownNamespace { signed, id }
    }
}

/// Longest text in tokens, if neither the files nor the workers have a limit.
const CONTEXT_DEFAULT: u32 = 4096;

/// The `owned_by` of all models. Clients ignore it, but the OpenAI API has it.
const OWNED_BY: &str = "refrain";

impl Model {
    /// Reads the files of a model.
    pub(crate) fn new(config: &ModelConfig, files: &ModelFiles) -> anyhow::Result<Self> {
        let tokenizer = files.tokenizer()?;
        let prefix = if config.text_only {
            TEXT_ONLY_PREFIX
        } else {
            ""
        };
        let mut stop_token_ids = config.stop_token_ids.clone();
        stop_token_ids.extend(end_tokens(files, &tokenizer));
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let (template, template_fault) = usable_template(config, files)?;
        let formats = formats(config, template.as_ref(), &tokenizer)?;
        let shows_tools = template
            .as_ref()
            .is_some_and(|template| shows_tools(template, &tokenizer));
        if shows_tools && formats.tools_as == ToolParserKind::None {
            tracing::warn!(
                model = config.id,
                "calls of tools come as text, because no parser is known for this template; set tool_parser of the model"
            );
        }
        Ok(Model {
            id: config.id.clone(),
            formats,
            shows_tools,
            is_text_only: config.text_only,
            template,
            template_fault,
            stop_token_ids,
            default_max_tokens: config.default_max_tokens,
            beyond_context: config.beyond_context,
            also: config.also.clone(),
            grammars: Grammars::default(),
            weights: Arc::default(),
            max_context: config.max_context.or_else(|| files.max_context()),
            tokenizer_identity: format!("{prefix}{}", tokenizer.identity()),
            tenants: config.tenants.clone(),
            tokenizer: Arc::new(tokenizer),
        })
    }

    /// The namespace of requests to it by a tenant, or a part of it.
    pub(crate) fn namespace(&self, scope: &str) -> Namespace {
        Namespace {
            tenant: scope.to_owned(),
            model: self.id.clone(),
            tokenizer: self.tokenizer_identity.clone(),
        }
    }

    /// The error of a chat request to a model whose chats cannot be rendered.
    pub(crate) fn no_chat(&self) -> ApiError {
        match &self.template_fault {
            Some(fault) => template_failed(&format!(
                "the chat template of the model {} cannot be used: {fault}",
                self.id
            )),
            None => ApiError::invalid(
                "model",
                "this model has no chat template; use /v1/completions",
            ),
        }
    }

    fn is_open_to(&self, tenant: &str) -> bool {
        self.tenants.is_empty() || self.tenants.iter().any(|name| *name == *tenant)
    }
}

/// The name of a parser that leaves the choice to the template and the special tokens.
const AUTO: &str = "auto";

/// How a model writes tool calls and reasoning, by its configuration.
fn formats(
    config: &ModelConfig,
    template: Option<&ChatTemplate>,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Detected> {
    let source = template.map(ChatTemplate::source).unwrap_or_default();
    let mut formats = detect(&source, &tokenizer.special_texts());
    let named = |name: &Option<String>| name.clone().filter(|name| name != AUTO);
    if let Some(name) = named(&config.tool_parser) {
        let of = || format!("tool_parser of the model (or {AUTO})");
        formats.tools_as = name.parse().with_context(of)?;
    }
    if let Some(name) = named(&config.reasoning_parser) {
        let of = || format!("reasoning_parser of the model (or {AUTO})");
        formats.reasoning_as = name.parse().with_context(of)?;
    }
    Ok(formats)
}

/// A request and a tool, in which a template has to find all that templates look for.
const PROBE_MESSAGES: &str = r#"[{"role": "user", "content": "a"}]"#;
const PROBE_TOOLS: &str = r#"[{"type": "function", "function": {"name": "f", "description": "b", "parameters":
    {"type": "object", "properties": {"c": {"type": "string", "description": "d"}}, "required": ["c"]}}}]"#;

/// Whether a prompt with tools differs from one without. A template that refuses either of them only has to name
/// tools.
fn shows_tools(template: &ChatTemplate, tokenizer: &Tokenizer) -> bool {
    let list = |json| serde_json::from_str::<JsonList>(json).unwrap_or_default();
    let prompt = |tools| {
        let input = ChatInput::new(list(PROBE_MESSAGES), tools, None);
        template.encode_within(tokenizer, &input, true, usize::MAX)
    };
    match (prompt(None), prompt(Some(list(PROBE_TOOLS)))) {
        (Ok(without), Ok(with)) => without != with,
        _ => template.source().contains("tools"),
    }
}

/// The end tokens in a model's files: `eos_token_id` of `config.json` and `generation_config.json`, and `eos_token`
/// of `tokenizer_config.json`. They often differ, since one ends a document and another a turn. Third-party engines
/// end at those in `generation_config.json` by themselves.
fn end_tokens(files: &ModelFiles, tokenizer: &Tokenizer) -> Vec<TokenId> {
    let parse = |bytes: &Option<Vec<u8>>| -> serde_json::Value {
        bytes
            .as_deref()
            .and_then(|bytes| serde_json::from_slice(bytes).ok())
            .unwrap_or_default()
    };
    let ids = |file: &Option<Vec<u8>>| match &parse(file)["eos_token_id"] {
        serde_json::Value::Array(ids) => ids.clone(),
        one => vec![one.clone()],
    };
    let mut found: Vec<TokenId> = [&files.config_json, &files.generation_config_json]
        .into_iter()
        .flat_map(ids)
        .filter_map(|id| id.as_u64())
        .filter_map(|id| TokenId::try_from(id).ok())
        .collect();
    let token = &parse(&files.tokenizer_config_json)["eos_token"];
    found.extend(
        token
            .as_str()
            .or_else(|| token["content"].as_str())
            .and_then(|text| tokenizer.token_id(text)),
    );
    found
}

/// Whether a name with one `*` stands for this one.
fn stands_for(alias: &str, name: &str) -> bool {
    let Some((begin, end)) = alias.split_once('*') else {
        return alias == name;
    };
    name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
}

impl Models {
    /// Reads the files of all models.
    ///
    /// # Errors
    /// Files cannot be read or used. The error names the model.
    pub(crate) fn new(
        configs: &[ModelConfig],
        files: &dyn Fn(&str) -> anyhow::Result<ModelFiles>,
        signer: NamespaceSigner,
    ) -> anyhow::Result<Self> {
        let models = configs
            .iter()
            .map(|config| {
                let read = files(&config.files).and_then(|files| Model::new(config, &files));
                read.map(Arc::new).with_context(|| {
                    format!(
                        "gateway.models: model {}: files = {:?}",
                        config.id, config.files
                    )
                })
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Models {
            models,
            created: clock::unix_s(),
            served: RwLock::default(),
            signer,
            signed: Mutex::default(),
        })
    }

    /// Finds the model of this name for a tenant.
    ///
    /// # Errors
    /// `NotFound` with code `model_not_found`, also for models that this tenant may not use.
    pub(crate) fn get(&self, tenant: &str, name: &str) -> Result<Arc<Model>, ApiError> {
        let open = || self.models.iter().filter(|model| model.is_open_to(tenant));
        let also = |fits: fn(&str, &str) -> bool| {
            open().find(|model| model.also.iter().any(|alias| fits(alias, name)))
        };
        let found = open().find(|model| model.id == name);
        let found = found.or_else(|| also(|alias, name| alias == name));
        let found = found.or_else(|| also(stands_for));
        found.cloned().ok_or_else(unknown_model)
    }

    /// The model of a tenant that has but one.
    pub(crate) fn only(&self, tenant: &str) -> Option<Arc<Model>> {
        let mut open = self.models.iter().filter(|model| model.is_open_to(tenant));
        let first = open.next()?;
        open.next().is_none().then(|| first.clone())
    }

    /// The weights of a model, as far as they are known. Nothing is known of a model that is not on offer.
    pub(crate) fn weights(&self, id: &str) -> Arc<KnownWeights> {
        let found = self.models.iter().find(|model| model.id == id);
        found.map_or_else(Arc::default, |model| model.weights.clone())
    }

    /// The models of a tenant, as far as `is_listed` holds for their ids.
    pub(crate) fn list(&self, tenant: &str, is_listed: impl Fn(&str) -> bool) -> ModelList {
        let models = self.models.iter();
        let open = models.filter(|model| model.is_open_to(tenant) && is_listed(&model.id));
        let named = open.flat_map(|model| {
            let also = model.also.iter().filter(|alias| !alias.contains('*'));
            let names = std::iter::once(&model.id).chain(also);
            names.map(|name| self.card(model, name))
        });
        ModelList {
            object: "list",
            data: named.collect(),
        }
    }

    /// The entry of a model in the list, under one of its names.
    pub(crate) fn card(&self, model: &Model, name: &str) -> ModelCard {
        ModelCard {
            id: name.to_owned(),
            object: "model",
            created: self.created,
            owned_by: OWNED_BY,
            max_model_len: Some(self.max_context(model)),
        }
    }

    /// The entry of a model that another server has.
    pub(crate) fn passed_card(&self, name: &str) -> ModelCard {
        ModelCard {
            id: name.to_owned(),
            object: "model",
            created: self.created,
            owned_by: OWNED_BY,
            max_model_len: None,
        }
    }

    /// Longest text of a model, tokens: the lesser of the limits of its files and its workers.
    pub(crate) fn max_context(&self, model: &Model) -> u32 {
        let served = self.served.read();
        let workers = served.iter().find(|entry| serves(entry, model));
        let workers = workers.map(|entry| entry.max_context);
        let limits = model.max_context.into_iter().chain(workers);
        limits.min().unwrap_or(CONTEXT_DEFAULT)
    }

    /// Whether all engines of a model hold outputs to forms by the grammars of this project.
    pub(crate) fn compiles_forms(&self, model: &Model) -> bool {
        let served = self.served.read();
        let mut ours = served.iter().filter(|entry| serves(entry, model));
        ours.next().is_some_and(|first| first.compiles_forms)
            && ours.all(|entry| entry.compiles_forms)
    }

    /// Number of live workers of a model, by the last answer of the scheduler.
    pub(crate) fn worker_count(&self, model: &Model) -> usize {
        let served = self.served.read();
        let ours = served.iter().filter(|entry| serves(entry, model));
        ours.map(|entry| entry.workers as usize).sum()
    }

    /// Takes an answer of the scheduler.
    pub(crate) fn update(&self, served: Vec<ServedModel>) {
        for entry in &served {
            let ours = self.models.iter().find(|model| model.id == entry.model);
            if ours.is_some_and(|model| model.tokenizer_identity != entry.tokenizer) {
                tracing::warn!(
                    model = entry.model,
                    "workers serve this model with another tokenizer; use the same files on both sides"
                );
            }
        }
        *self.served.write() = served;
    }

    /// Why no request for any model can be served, in words for people. One model with a worker that takes chunks is
    /// enough: a gateway that is out for one model of many would be out for all.
    ///
    /// # Errors
    /// The reasons, at most one for each model.
    pub(crate) fn check_served(&self) -> Result<(), String> {
        let served = self.served.read();
        let mut troubles = Vec::new();
        for model in &self.models {
            for entry in served.iter().filter(|entry| serves(entry, model)) {
                if entry.open.is_none_or(|open| open > 0) {
                    return Ok(());
                }
                let trouble = entry
                    .trouble
                    .as_deref()
                    .unwrap_or("its workers take no requests");
                troubles.push(format!("{}: {trouble}", model.id));
            }
        }
        Err(match troubles.is_empty() {
            true => "no worker serves any of the models".to_owned(),
            false => format!("no model can be served now. {}", troubles.join("; ")),
        })
    }

    /// The signed namespace of a model and of a tenant, or a part of it. It is signed anew after half of the life of
    /// a signature.
    pub(crate) fn namespace(&self, scope: &str, model: &Model) -> Arc<KnownNamespace> {
        let mut signed = self.signed.lock();
        let now_s = clock::unix_s();
        // A signature from the future was made before the clock was set back, and would be refused.
        let is_fresh = |known: &&Arc<KnownNamespace>| {
            let issued_at_s = known.signed.issued_at_s;
            issued_at_s <= now_s && now_s - issued_at_s < NAMESPACE_TTL_S / 2
        };
        let of_model = signed.get_mut(&model.id);
        let known = of_model.and_then(|of_model| of_model.get(scope));
        if let Some(known) = known.filter(is_fresh) {
            return known.clone();
        }
        let fresh: KnownNamespace = self.signer.sign(model.namespace(scope)).into();
        let fresh = Arc::new(fresh);
        let of_model = signed.entry(model.id.clone());
        let of_model = of_model.or_insert_with(|| LruCache::new(SIGNED_MAX));
        of_model.put(scope.to_owned(), fresh.clone());
        fresh
    }
}

fn serves(entry: &ServedModel, model: &Model) -> bool {
    entry.workers > 0 && entry.model == model.id && entry.tokenizer == model.tokenizer_identity
}

/// The error for a model that there is not, or that the caller may not use.
pub(crate) fn unknown_model() -> ApiError {
    let message = "the model does not exist, or this key may not use it; GET /v1/models lists the models of this key";
    ApiError {
        kind: ErrorKind::NotFound,
        ..ApiError::invalid("model", message).with_code(code::MODEL_NOT_FOUND)
    }
}

#[cfg(test)]
mod tests {
    use super::template::CHAT_TEMPLATE_FAILED;
    use super::*;
    use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
    use refrain_tokenization::testing::{IM_END, byte_level_files};

    fn models() -> (Models, MeshAuth) {
        let mesh = MeshConfig::generate().unwrap();
        let configs = [
            ModelConfig {
                id: "open".into(),
                files: "x".into(),
                ..ModelConfig::default()
            },
            ModelConfig {
                id: "closed".into(),
                files: "x".into(),
                tenants: vec!["acme".parse().unwrap()],
                ..ModelConfig::default()
            },
        ];
        let signer = NamespaceSigner::new(&mesh).unwrap();
        let models = Models::new(&configs, &|_| Ok(byte_level_files()), signer).unwrap();
        (models, MeshAuth::new(&mesh).unwrap())
    }

    fn served(models: &Models, workers: u32, max_context: u32) -> ServedModel {
        let tokenizer = models.models[0].tokenizer.identity().to_owned();
        ServedModel {
            model: "open".into(),
            tokenizer,
            max_context,
            workers,
            open: None,
            trouble: None,
            compiles_forms: true,
        }
    }

    #[test]
    fn a_tenant_sees_only_its_models() {
        let (models, _) = models();
        assert_eq!(models.list("acme", |_| true).data.len(), 2);
        assert_eq!(models.list("bolt", |_| true).data.len(), 1);
        let error = models.get("bolt", "closed").unwrap_err();
        assert_eq!(
            (error.kind, error.code.as_deref()),
            (ErrorKind::NotFound, Some("model_not_found"))
        );
        assert_eq!(
            models.get("acme", "closed").unwrap().stop_token_ids,
            [IM_END]
        );
    }

    #[test]
    fn a_model_has_further_names_and_its_own_comes_first() {
        let mesh = MeshConfig::generate().unwrap();
        let config = |id: &str, also: &[&str]| ModelConfig {
            id: id.into(),
            files: "x".into(),
            also: also.iter().map(|name| (*name).to_owned()).collect(),
            ..ModelConfig::default()
        };
        let configs = [
            config("a", &["gpt-*", "claude-*-haiku"]),
            config("b", &["*", "gpt-5"]),
            config("gpt-4", &[]),
        ];
        let signer = NamespaceSigner::new(&mesh).unwrap();
        let models = Models::new(&configs, &|_| Ok(byte_level_files()), signer).unwrap();
        for (name, id) in [
            ("a", "a"),
            ("gpt-4", "gpt-4"),
            ("gpt-5", "b"),
            ("gpt-6", "a"),
            ("claude-9-haiku", "a"),
            ("claude-haiku", "b"),
            ("anything", "b"),
        ] {
            assert_eq!(models.get("t", name).unwrap().id, id, "{name}");
        }
        let listed = models.list("t", |_| true).data;
        let listed: Vec<_> = listed.iter().map(|card| card.id.as_str()).collect();
        assert_eq!(listed, ["a", "b", "gpt-5", "gpt-4"]);
    }

    #[test]
    fn outputs_end_at_the_end_tokens_of_all_files() {
        let ends = |generation_config: &str| {
            let files = ModelFiles {
                generation_config_json: Some(generation_config.into()),
                ..byte_level_files()
            };
            Model::new(&ModelConfig::default(), &files)
                .unwrap()
                .stop_token_ids
        };
        assert_eq!(ends(r#"{"eos_token_id": [5, 7]}"#), [IM_END, 5, 7]);
        assert_eq!(ends(r#"{"eos_token_id": 5}"#), [IM_END, 5]);
        assert_eq!(ends("no JSON"), [IM_END]);
    }

    #[test]
    fn one_worker_that_takes_requests_is_enough_to_be_ready() {
        let (models, _) = models();
        let of = |model: &str, open, trouble: &str| ServedModel {
            model: model.into(),
            open,
            trouble: Some(trouble.into()),
            ..served(&models, 2, 64)
        };
        let away = of(
            "open",
            Some(0),
            "the engine at http://10.0.0.5:8000 does not answer",
        );
        let drained = of("closed", Some(0), "drained by an operator");
        models.update(vec![away.clone(), drained]);
        let why = models.check_served().unwrap_err();
        assert_eq!(
            why,
            "no model can be served now. open: the engine at http://10.0.0.5:8000 does not answer; closed: drained \
             by an operator"
        );
        models.update(vec![away, of("closed", Some(1), "one of them drains")]);
        assert_eq!(models.check_served(), Ok(()));
        // A scheduler of an earlier version does not say.
        models.update(vec![of("open", None, "")]);
        assert_eq!(models.check_served(), Ok(()));
    }

    #[test]
    fn a_model_is_served_by_workers_with_its_tokenizer() {
        let (models, _) = models();
        let open = models.get("a", "open").unwrap();
        assert!(models.check_served().is_err());
        assert_eq!(models.max_context(&open), 512);
        models.update(vec![ServedModel {
            tokenizer: "other".into(),
            ..served(&models, 1, 64)
        }]);
        assert!(models.check_served().is_err());
        models.update(vec![served(&models, 1, 64)]);
        assert!(models.check_served().is_ok() && models.compiles_forms(&open));
        assert_eq!(models.max_context(&open), 64);
        models.update(vec![served(&models, 0, 64)]);
        assert!(models.check_served().is_err() && !models.compiles_forms(&open));
        models.update(vec![ServedModel {
            compiles_forms: false,
            ..served(&models, 1, 64)
        }]);
        assert!(!models.compiles_forms(&open));
    }

    #[test]
    fn a_model_of_a_text_only_engine_is_another_namespace() {
        let (models, auth) = models();
        let open = models.get("a", "open").unwrap();
        let config = ModelConfig {
            id: "open".into(),
            text_only: true,
            ..ModelConfig::default()
        };
        let by_text = Model::new(&config, &byte_level_files()).unwrap();
        assert!(serves(&served(&models, 1, 64), &open));
        assert!(!serves(&served(&models, 1, 64), &by_text));
        let ids = [&*open, &by_text].map(|model| {
            let signed = models.signer.sign(Namespace {
                tenant: "a".into(),
                model: model.id.clone(),
                tokenizer: model.tokenizer_identity.clone(),
            });
            auth.verify(&signed).unwrap()
        });
        assert_ne!(ids[0], ids[1]);
    }

    #[test]
    fn namespaces_are_signed_once() {
        let (models, auth) = models();
        let open = models.get("a", "open").unwrap();
        let first = models.namespace("a", &open);
        assert_eq!(models.namespace("a", &open), first);
        assert_eq!(auth.verify(&first.signed).unwrap(), first.id);
        assert_ne!(models.namespace("b", &open).id, first.id);
    }

    #[test]
    fn after_the_clock_is_set_back_namespaces_are_signed_anew() {
        let (models, auth) = models();
        let open = models.get("a", "open").unwrap();
        let signed = models.namespace("a", &open);
        let future_s = clock::unix_s() + 2 * NAMESPACE_TTL_S;
        let names = signed.signed.namespace.clone();
        let ahead = models.signer.sign_at(names, future_s);
        assert!(auth.verify(&ahead).is_err());
        let mut known = LruCache::new(SIGNED_MAX);
        known.put("a".to_owned(), Arc::new(ahead.into()));
        models.signed.lock().insert(open.id.clone(), known);
        assert!(auth.verify(&models.namespace("a", &open).signed).is_ok());
    }

    #[test]
    fn bad_files_are_reported_with_the_models_name() {
        let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
        let config = ModelConfig {
            id: "m".into(),
            files: "/nowhere".into(),
            ..ModelConfig::default()
        };
        let read = |path: &str| ModelFiles::from_dir(path).map_err(anyhow::Error::from);
        let error = Models::new(&[config], &read, signer).err().unwrap();
        assert!(format!("{error:#}").contains("model m: files = \"/nowhere\""));
    }

    #[test]
    fn a_faulty_template_turns_chat_off_and_nothing_else() {
        let model = |template: &[u8]| {
            let files = ModelFiles {
                chat_template: Some(template.into()),
                ..byte_level_files()
            };
            Model::new(
                &ModelConfig {
                    id: "m".into(),
                    ..ModelConfig::default()
                },
                &files,
            )
            .unwrap()
        };
        for (template, fault) in [
            (&b"{% nonsense %}"[..], "unknown statement nonsense"),
            (b"{{ nothing.at.all }}", "undefined"),
            (b"\xff", "utf-8"),
            (b"{{ '%1000000000d' | format(1) }}", "a value of more than"),
        ] {
            let model = model(template);
            assert!(model.template.is_none());
            let error = model.no_chat();
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (ErrorKind::InvalidRequest, None)
            );
            assert_eq!(error.code.as_deref(), Some(CHAT_TEMPLATE_FAILED));
            let message = error.to_string();
            assert!(
                message.contains(fault) && message.contains("model m"),
                "{message}"
            );
        }
        // A template that refuses the small chat is sound.
        assert!(model(b"{{ raise_exception('no') }}").template.is_some());
        let files = ModelFiles {
            chat_template: None,
            ..byte_level_files()
        };
        let none = Model::new(&ModelConfig::default(), &files).unwrap();
        assert_eq!(none.no_chat().param.as_deref(), Some("model"));
    }

    #[test]
    fn a_date_that_is_none_is_an_error_of_the_configuration() {
        let config = |date: &str| ModelConfig {
            template_date: Some(date.into()),
            ..ModelConfig::default()
        };
        Model::new(&config("2026-01-31"), &byte_level_files()).unwrap();
        let error = Model::new(&config("today"), &byte_level_files()).unwrap_err();
        assert!(format!("{error:#}").contains("template_date"), "{error:#}");
    }
}
