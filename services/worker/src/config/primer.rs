//! The primer of the table from which a llama-server drafts by itself.

use serde::Deserialize;

/// Largest [`PrimerConfig::tokens_max`]. A llama-server forgets its whole table once a million of its four million
/// cells are taken. All namespaces that are primed take half of that million together.
const TOKENS_MAX: u32 = 65_536;

/// The primer of a llama-server with `--spec-type ngram-mod`. It sends past outputs to the server, so that a server
/// that was started again drafts from them, and so that all servers draft from the outputs of each.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct PrimerConfig {
    /// Most tokens of the newest outputs that the server is sent after each of its starts, for each namespace. 0: no
    /// primer. All tenants of a server share its table, so one of them may find out by timing what another was told.
    pub tokens_max: u32,
    /// Pause between two looks at the server, milliseconds. Between them a restart is not noticed.
    #[serde(skip)]
    pub pause_ms: u64,
}

impl Default for PrimerConfig {
    fn default() -> Self {
        PrimerConfig {
            tokens_max: 0,
            pause_ms: 500,
        }
    }
}

impl PrimerConfig {
    /// Whether there is a primer.
    pub(crate) fn is_on(&self) -> bool {
        self.tokens_max > 0
    }

    pub(super) fn check(&self, check: &mut impl FnMut(bool, &str)) {
        check(
            self.tokens_max <= TOKENS_MAX,
            &format!("engine.primer.tokens_max: at most {TOKENS_MAX}"),
        );
    }
}
