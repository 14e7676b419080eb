//! The form of an output, as far as a draft of it needs it.

use refrain_output_grammar::TokenMask;
use refrain_protocol::TokenId;

/// The tokens that a draft may go on with.
pub(crate) enum AllowedTokens {
    /// All of the vocabulary.
    All,
    /// The tokens of this set, which is never empty.
    These(TokenMask),
    /// None: the output is over, or its form cannot be followed further.
    None,
}

/// The form that an output must have, which is asked while a draft of the output grows.
pub(crate) trait DraftForm {
    /// The tokens that may come after `path`, which follows the text.
    fn allowed_after(&mut self, path: &[TokenId]) -> AllowedTokens;
}
