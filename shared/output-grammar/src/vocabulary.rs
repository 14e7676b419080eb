//! The vocabulary as llguidance needs it: the bytes of every token, and how the tokenizer itself would write a text.

use std::sync::Arc;

use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use refrain_tokenization::Tokenizer;

use crate::{GrammarError, TokenId};

/// Longer tokens are never offered: the trie has no room for deeper nodes.
const TOKEN_BYTES_MAX: usize = 1_000;

/// Texts by which [`keeps_bytes`] judges a tokenizer.
const PROBES: [&str; 6] = ["a", "\"name\"", ": ", "{\"x\": [", "true, ", "9.5"];

pub(crate) struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    keeps_bytes: bool,
}

impl Vocabulary {
    /// `vocab_size` is that of the model, which may have more tokens than the tokenizer. Those have no text, and no
    /// grammar allows them.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        vocab_size: u32,
        eos: &[TokenId],
    ) -> Result<Self, GrammarError> {
        let vocab_size = vocab_size.max(tokenizer.vocab_size());
        let (Some(first), true) = (eos.first(), eos.iter().all(|token| *token < vocab_size)) else {
            return Err(GrammarError::Model(
                "it names no token of its vocabulary that ends an output",
            ));
        };
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let words: Vec<Vec<u8>> = (0..vocab_size)
            .map(|token| {
                let bytes = tokenizer.token_bytes(token);
                let special = tokenizer.is_special(token) || eos.contains(&token);
                match bytes {
                    _ if bytes.len() > TOKEN_BYTES_MAX => Vec::new(),
                    [] if special => [&[marker], &*format!("<[{token}]>").into_bytes()].concat(),
                    _ if special => [&[marker], bytes].concat(),
                    // No text has this byte, and the trie would take the token for a special one.
                    [first, ..] if *first == marker => Vec::new(),
                    _ => bytes.to_vec(),
                }
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, *first), &words);
        Ok(Vocabulary {
            trie: trie.with_eos_tokens(eos),
            keeps_bytes: keeps_bytes(&tokenizer),
            tokenizer,
        })
    }

    pub(crate) fn into_env(self) -> TokEnv {
        Arc::new(self)
    }
}

/// Whether the tokens of a text have the bytes of the text. Some tokenizers put a space before it.
fn keeps_bytes(tokenizer: &Tokenizer) -> bool {
    let keeps = |text: &&str| encode_exactly(tokenizer, text).is_some();
    PROBES.iter().all(keeps)
}

fn encode_exactly(tokenizer: &Tokenizer, text: &str) -> Option<Vec<TokenId>> {
    let tokens = tokenizer.encode(text).ok()?;
    let bytes = tokens.iter().map(|token| tokenizer.token_bytes(*token));
    let same = bytes.flatten().eq(text.as_bytes());
    same.then_some(tokens)
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// A normalizer may change a text that a grammar forces. It is then written by the longest tokens instead.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| {
            let exact = encode_exactly(&self.tokenizer, text);
            exact.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    /// Only then does a text that a grammar forces mean certain tokens.
    fn tokenize_is_canonical(&self) -> bool {
        self.keeps_bytes
    }
}
