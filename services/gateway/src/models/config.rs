//! The configuration of a model.

use refrain_protocol::TenantName;
use serde::Deserialize;

/// The treatment of an output limit that is larger than the room that the prompt leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BeyondContext {
    /// It is cut to that room. The output is the same, and ends with `length`.
    #[default]
    Cut,
    /// The request is refused.
    Refuse,
}

/// One model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct ModelConfig {
    /// Public name, under which workers serve it as well.
    pub id: String,
    /// Folder with `tokenizer.json`, or `builtin:` and a name. It may have `tokenizer_config.json`,
    /// `chat_template.jinja`, `config.json` and `generation_config.json`; it needs no weights.
    pub files: String,
    /// The date that the chat template sees, such as `2026-01-31`, so that prompts can be reproduced. A request can
    /// set it with the variable `strftime_now` in `chat_template_kwargs`. Default: the time now in UTC. A prompt with
    /// today's date is another one tomorrow, so a prefix cache helps up to the date only.
    pub template_date: Option<String>,
    /// Output limit of chat requests that set none, tokens. Default: what the context leaves.
    pub default_max_tokens: Option<u32>,
    /// The treatment of an output limit that is larger than the room that the prompt leaves: `cut` to that room, or
    /// `refuse` the request, as vLLM does. Agents ask for the same limit in each turn, so a refusal ends their
    /// sessions early.
    pub beyond_context: BeyondContext,
    /// Further names, such as `claude-*`: one `*` stands for any text. Answers have the name that was asked for, and
    /// lists of models have those without a `*`. A name of a model itself comes first, then names without a `*`, then
    /// the first model that fits.
    pub also: Vec<String>,
    /// Longest text, tokens. Default: the limit in `config.json`. The limit of the workers holds as well.
    pub max_context: Option<u32>,
    /// Whether its engine speaks only text (`worker.engine.kind = "openai"`). Such outputs have a namespace of their
    /// own, apart from those of engines that speak token ids.
    pub text_only: bool,
    /// How the model writes tool calls, by the names of vLLM, such as `hermes`, or `none`. Default: `auto`, by its
    /// template and special tokens.
    pub tool_parser: Option<String>,
    /// How the model writes reasoning, by the names of vLLM, such as `deepseek_r1`, or `none`, or by its markers, as
    /// in `<reason>...</reason>`. Default: `auto`, by its template and special tokens.
    pub reasoning_parser: Option<String>,
    /// Token ids that end an output, besides those in the model's files.
    pub stop_token_ids: Vec<u32>,
    /// Tenants that may use it. Empty: all.
    #[schemars(with = "Vec<String>")]
    pub tenants: Vec<TenantName>,
}
