//! The text of a request: its prompt, and its output so far.

use refrain_protocol::NamespaceId;
use refrain_protocol::prefix::{PrefixHash, PrefixHasher};

/// The text of a request.
pub(crate) struct Text {
    /// Prompt and output.
    tokens: Vec<u32>,
    prompt_len: u32,
    /// It has read the tokens up to the last time that the hash was asked for.
    hasher: PrefixHasher,
}

impl Text {
    /// A text that begins with a prompt, which the output of earlier chunks may follow.
    pub(super) fn new(tokens: Vec<u32>, prompt_len: u32, namespace: &NamespaceId) -> Self {
        Text {
            tokens,
            prompt_len,
            hasher: PrefixHasher::new(namespace),
        }
    }

    /// Prompt and output.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Length of prompt and output.
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Length of the prompt.
    pub(crate) fn prompt_len(&self) -> u32 {
        self.prompt_len
    }

    /// Output tokens so far, earlier chunks included.
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len as usize..]
    }

    /// Length of the output so far, earlier chunks included.
    pub(crate) fn output_len(&self) -> u32 {
        self.len() - self.prompt_len
    }

    pub(super) fn append(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// The hash of the whole text. No token is hashed twice.
    pub(super) fn hash(&mut self) -> PrefixHash {
        let hashed = self.hasher.context_len();
        self.hasher.extend(&self.tokens[hashed..]);
        self.hasher.whole()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_grew_has_the_hash_of_one_that_came_whole() {
        let namespace = NamespaceId(7);
        let mut grown = Text::new(vec![1, 2, 3], 2, &namespace);
        assert_eq!((grown.output(), grown.output_len()), (&[3][..], 1));
        let before = grown.hash();
        assert_eq!(grown.hash(), before);
        grown.append(&[4, 5]);
        let mut whole = Text::new(vec![1, 2, 3, 4, 5], 2, &namespace);
        assert_eq!(grown.tokens(), whole.tokens());
        assert_eq!(grown.hash(), whole.hash());
        assert_ne!(grown.hash(), before);
    }
}
