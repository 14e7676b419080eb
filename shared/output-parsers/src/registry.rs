//! The names of formats, as vLLM and SGLang spell them.

use std::fmt;
use std::str::FromStr;

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolParserKind {
    /// Output has no calls.
    #[default]
    None,
    /// A JSON object in `<tool_call>`.
    Hermes,
    /// Tags `<function=name>` and `<parameter=name>`.
    Qwen3Coder,
    /// Bare JSON objects, perhaps after `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS]` with an array or with `[ARGS]`.
    Mistral,
    /// DeepSeek V3 and R1: calls in fences between markers.
    DeepSeekV3,
    /// DeepSeek V3.1: calls between markers.
    DeepSeekV31,
    /// Kimi K2: calls between markers, with ids.
    KimiK2,
    /// GLM 4.5 and later: keys and values between markers.
    Glm45,
    /// gpt-oss: messages to functions. It includes reasoning.
    Harmony,
    /// A Python list of calls.
    Pythonic,
}

/// All names of tool formats. The first of each format is its own.
const TOOL_NAMES: &[(ToolParserKind, &[&str])] = &[
    (ToolParserKind::None, &["none"]),
    (
        ToolParserKind::Hermes,
        &["hermes", "qwen", "qwen25", "qwen2_5"],
    ),
    (
        ToolParserKind::Qwen3Coder,
        &["qwen3_coder", "qwen3_xml", "step3p5", "mimo"],
    ),
    (
        ToolParserKind::Llama3Json,
        &["llama3_json", "llama4_json", "llama3", "llama3.1"],
    ),
    (ToolParserKind::Mistral, &["mistral"]),
    (ToolParserKind::DeepSeekV3, &["deepseek_v3", "deepseekv3"]),
    (
        ToolParserKind::DeepSeekV31,
        &["deepseek_v31", "deepseekv31"],
    ),
    (ToolParserKind::KimiK2, &["kimi_k2"]),
    (
        ToolParserKind::Glm45,
        &["glm45", "glm47", "glm", "glm4_moe"],
    ),
    (
        ToolParserKind::Harmony,
        &["openai", "harmony", "gpt_oss", "gpt-oss"],
    ),
    (ToolParserKind::Pythonic, &["pythonic", "llama4_pythonic"]),
];

/// How a model writes reasoning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ReasoningParserKind {
    /// Output has no reasoning.
    #[default]
    None,
    /// `</think>` ends it, and it is open from the beginning. The opening marker may be repeated.
    DeepSeekR1,
    /// `<think>` and `</think>`. A call ends it as well.
    Qwen3,
    /// `[THINK]` and `[/THINK]`.
    Mistral,
    /// `<seed:think>` and `</seed:think>`.
    SeedOss,
    /// `<|START_THINKING|>` and `<|END_THINKING|>`.
    Cohere,
    /// `◁think▷` and `◁/think▷`.
    Kimi,
    /// gpt-oss: the channel `analysis`. It includes calls.
    Harmony,
    /// Markers of the caller's own.
    Markers {
        /// The opening marker.
        open: String,
        /// The closing marker.
        close: String,
    },
}

/// All names of reasoning formats. The first of each format is its own.
const REASONING_NAMES: &[(ReasoningParserKind, &[&str])] = &[
    (ReasoningParserKind::None, &["none"]),
    (
        ReasoningParserKind::DeepSeekR1,
        &[
            "deepseek_r1",
            "deepseek-r1",
            "qwen3-thinking",
            "step3",
            "minimax_m2",
            "olmo3",
        ],
    ),
    (
        ReasoningParserKind::Qwen3,
        &[
            "qwen3",
            "think",
            "glm45",
            "glm47",
            "deepseek_v3",
            "deepseek-v3",
            "deepseek_v31",
            "kimi_k2",
            "mimo",
            "nemotron_v3",
        ],
    ),
    (ReasoningParserKind::Mistral, &["mistral", "magistral"]),
    (ReasoningParserKind::SeedOss, &["seed_oss"]),
    (
        ReasoningParserKind::Cohere,
        &["cohere", "cohere_command3", "cohere_command4"],
    ),
    (ReasoningParserKind::Kimi, &["kimi"]),
    (
        ReasoningParserKind::Harmony,
        &["openai_gptoss", "gpt-oss", "gpt_oss", "harmony", "openai"],
    ),
];

impl ReasoningParserKind {
    /// The opening and the closing marker. Harmony, which has channels, and `None` have none.
    pub fn markers(&self) -> Option<(&str, &str)> {
        Some(match self {
            ReasoningParserKind::None | ReasoningParserKind::Harmony => return None,
            ReasoningParserKind::DeepSeekR1 | ReasoningParserKind::Qwen3 => ("<think>", "</think>"),
            ReasoningParserKind::Mistral => ("[THINK]", "[/THINK]"),
            ReasoningParserKind::SeedOss => ("<seed:think>", "</seed:think>"),
            ReasoningParserKind::Cohere => ("<|START_THINKING|>", "<|END_THINKING|>"),
            ReasoningParserKind::Kimi => ("◁think▷", "◁/think▷"),
            ReasoningParserKind::Markers { open, close } => (open, close),
        })
    }

    /// The marker that ends the reasoning; in harmony, that of the reasoning's message. `None` without reasoning.
    pub fn end_marker(&self) -> Option<&str> {
        match self {
            ReasoningParserKind::Harmony => Some("<|end|>"),
            _ => self.markers().map(|(_, close)| close),
        }
    }

    /// Whether a rendered prompt leaves the reasoning open, as templates do that write the opening marker themselves.
    pub fn is_open_after(&self, prompt: &str) -> bool {
        let Some((open, _)) = self.markers() else {
            return false;
        };
        match prompt.rfind(open) {
            Some(at) => prompt[at + open.len()..].trim().is_empty(),
            None => false,
        }
    }

    pub(crate) fn is_harmony(&self) -> bool {
        *self == ReasoningParserKind::Harmony
    }

    /// Whether models of this kind usually begin within the reasoning.
    pub fn is_usually_open(&self) -> bool {
        *self == ReasoningParserKind::DeepSeekR1
    }

    /// Markers of calls that end the reasoning, where models forget to close it.
    pub(crate) fn call_markers(&self) -> &'static [&'static str] {
        match self {
            ReasoningParserKind::Qwen3 => &["<tool_call>", "<|tool_calls_section_begin|>"],
            _ => &[],
        }
    }
}

/// A name that no format has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no {what} parser; there are: {known}")]
pub struct UnknownParser {
    name: String,
    what: &'static str,
    known: String,
}

fn find<K: Clone>(
    what: &'static str,
    names: &[(K, &[&str])],
    name: &str,
) -> Result<K, UnknownParser> {
    let wanted = name.trim().to_ascii_lowercase();
    let found = names
        .iter()
        .find(|(_, names)| names.contains(&wanted.as_str()));
    if let Some((kind, _)) = found {
        return Ok(kind.clone());
    }
    let known: Vec<&str> = names
        .iter()
        .flat_map(|(_, names)| *names)
        .copied()
        .collect();
    Err(UnknownParser {
        name: name.to_owned(),
        what,
        known: known.join(", "),
    })
}

impl ToolParserKind {
    /// Whether a marker begins a call, so that no other text looks like one.
    pub fn marks_calls(self) -> bool {
        !matches!(self, ToolParserKind::Llama3Json | ToolParserKind::Pythonic)
    }
}

impl FromStr for ToolParserKind {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        find("tool", TOOL_NAMES, name)
    }
}

impl fmt::Display for ToolParserKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = TOOL_NAMES.iter().find(|(kind, _)| kind == self);
        f.write_str(names.map_or("none", |(_, names)| names[0]))
    }
}

/// Reads a name, or own markers with three dots between them, as in `<reason>...</reason>`.
impl FromStr for ReasoningParserKind {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        match name.split_once("...") {
            Some((open, close)) if !open.is_empty() && !close.is_empty() && open != close => {
                Ok(ReasoningParserKind::Markers {
                    open: open.to_owned(),
                    close: close.to_owned(),
                })
            }
            _ => find("reasoning", REASONING_NAMES, name),
        }
    }
}

impl fmt::Display for ReasoningParserKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let ReasoningParserKind::Markers { open, close } = self {
            return write!(f, "{open}...{close}");
        }
        let names = REASONING_NAMES.iter().find(|(kind, _)| kind == self);
        f.write_str(names.map_or("none", |(_, names)| names[0]))
    }
}
