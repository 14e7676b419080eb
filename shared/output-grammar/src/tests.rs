//! Tests with the vocabulary of the model that the repository ships.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod budgets;
mod caching;
mod calls;
mod grammars;
mod patterns;
mod refusals;
mod walks;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use refrain_protocol::engine::{OutputForm, TextForm};
use refrain_tokenization::{ModelFiles, Tokenizer};

use crate::{GrammarCompiler, GrammarError, GrammarLimits, Matcher, TokenId};

struct Model {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    eos: TokenId,
}

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../services/reference-engine/model");
    let tokenizer = Arc::new(ModelFiles::from_dir(folder).unwrap().tokenizer().unwrap());
    let eos = tokenizer.token_id("<|im_end|>").unwrap();
    let size = tokenizer.vocab_size();
    let limits = GrammarLimits::default();
    let compiler = GrammarCompiler::new(tokenizer.clone(), size, &[eos], limits).unwrap();
    Model {
        tokenizer,
        compiler,
        eos,
    }
});

fn form(text: TextForm) -> OutputForm {
    OutputForm::new(text)
}

fn matcher(text: TextForm) -> Matcher {
    MODEL.compiler.compile(&form(text)).unwrap().matcher()
}

fn schema(text: &str) -> TextForm {
    TextForm::JsonSchema(text.to_owned())
}

fn refusal(text: TextForm) -> GrammarError {
    let outcome = MODEL.compiler.compile(&form(text.clone()));
    outcome
        .err()
        .unwrap_or_else(|| panic!("{text:?} was compiled"))
}

fn encode(text: &str) -> Vec<TokenId> {
    MODEL.tokenizer.encode_trusted(text).unwrap()
}

/// Whether the form allows the whole text, in the tokens of the tokenizer, and then its end.
fn allows(form: TextForm, text: &str) -> bool {
    let mut matcher = matcher(form);
    let tokens = encode(text);
    matcher.advance_while_allowed(&tokens).unwrap() == tokens.len() && matcher.may_end().unwrap()
}
