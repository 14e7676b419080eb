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
        is_open(&self.tenants, tenant)
    }
}

/// Whether something for these tenants, or for all if there are none, is open to a tenant.
pub(crate) fn is_open(tenants: &[TenantName], tenant: &str) -> bool {
    tenants.is_empty() || tenants.iter().any(|name| *name == *tenant)
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
mod tests;
