//! The names that programs give to their conversations and users, where a body has no `session`.

use actix_web::http::header::HeaderMap;
use serde_json::Value;

use super::ParsedRequest;

/// Heads in which programs name a conversation, in the order in which they count: Claude Code's, Codex's, OpenCode's
/// two, that of gateways and of pi, and that of SGLang's router.
const SESSION_HEADS: [&str; 7] = [
    "x-claude-code-session-id",
    "session-id",
    "x-session-affinity",
    "x-session-id",
    "x-affinity",
    "session_id",
    "x-smg-routing-key",
];

/// The head by which Claude Code tells its subagents apart. Each has a prompt of its own.
const SUBAGENT_HEAD: &str = "x-claude-code-agent-id";

/// Longest name of a session, bytes, as for `session` in a body.
const NAME_BYTES_MAX: usize = 256;

/// The name of the conversation in the heads of a request.
pub fn session_of_heads(heads: &HeaderMap) -> Option<String> {
    let of_head = |name: &str| heads.get(name)?.to_str().ok();
    let session = SESSION_HEADS.iter().find_map(|name| of_head(name))?;
    Some(match of_head(SUBAGENT_HEAD) {
        Some(agent) => format!("{session}/{agent}"),
        None => session.to_owned(),
    })
}

impl ParsedRequest {
    /// Takes the name of the conversation from the head of the request, or else from `prompt_cache_key`, if the body
    /// names no session. A name that is too long names none.
    pub fn name_session(&mut self, head: &HeaderMap) {
        let is_name = |name: &String| (1..=NAME_BYTES_MAX).contains(&name.len());
        if self.session.is_some() {
            return;
        }
        let session = session_of_heads(head).filter(is_name);
        self.session = session.or_else(|| self.prompt_cache_key.take().filter(is_name));
    }
}

/// The user and the session that a program names in one text, as `metadata.user_id` of Messages has it. It is the
/// client's word, so it is a hint and no boundary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NamedUser {
    pub(crate) user: Option<String>,
    pub(crate) session: Option<String>,
}

impl NamedUser {
    /// Reads the text. Claude Code writes JSON with the account, the device and the session, and before it wrote
    /// `user_.._account_.._session_..`; Kimi Code writes `session_..`. Any other text is the user's name.
    pub(crate) fn of(text: &str) -> Self {
        let parsed = serde_json::from_str::<Value>(text).ok();
        if let Some(Value::Object(fields)) = parsed {
            let field = |name: &str| {
                let value = fields.get(name)?.as_str()?;
                (!value.is_empty()).then(|| value.to_owned())
            };
            return NamedUser {
                user: field("account_uuid").or_else(|| field("device_id")),
                session: field("session_id"),
            };
        }
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        match text.rsplit_once("session_") {
            Some((before, session)) if before.is_empty() || before.ends_with('_') => NamedUser {
                user: some(before.trim_end_matches('_')),
                session: some(session),
            },
            _ => NamedUser {
                user: some(text),
                session: None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_and_a_session_are_told_apart() {
        let named = |user: &str, session: &str| {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            NamedUser {
                user: some(user),
                session: some(session),
            }
        };
        for (text, expected) in [
            (
                r#"{"device_id":"d","account_uuid":"a","session_id":"s"}"#,
                named("a", "s"),
            ),
            (
                r#"{"device_id":"d","account_uuid":"","session_id":"s"}"#,
                named("d", "s"),
            ),
            ("{}", named("", "")),
            ("user_d_account_a_session_s", named("user_d_account_a", "s")),
            ("session_s", named("", "s")),
            ("ann@example.com", named("ann@example.com", "")),
            ("my-session_7", named("my-session_7", "")),
            ("", named("", "")),
        ] {
            assert_eq!(NamedUser::of(text), expected, "{text}");
        }
    }
}
