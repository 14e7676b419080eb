//! The compiler of forms for one model, which is made when a request first asks for a form.

use std::fmt;
use std::sync::{Arc, OnceLock};

use refrain_output_grammar::{GrammarCompiler, GrammarError, GrammarLimits};
use refrain_protocol::TokenId;
use refrain_protocol::engine::OutputForm;
use refrain_tokenization::Tokenizer;

/// Compiles the forms of a model, to learn whether its engine can.
#[derive(Default)]
pub(crate) struct Grammars {
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

impl Grammars {
    /// Whether a form that was judged lately can be compiled. `None`: it was not.
    pub(crate) fn known(&self, form: &OutputForm) -> Option<Result<(), GrammarError>> {
        // The form is written as JSON to be found, which a long one is not worth.
        if form.text.text_bytes() > GrammarLimits::default().form_bytes_max {
            return None;
        }
        match self.compiler.get()? {
            Ok(compiler) => compiler.verdict(form),
            Err(error) => Some(Err(error.clone())),
        }
    }

    /// Whether a form can be compiled. It takes milliseconds, and the first call up to half a second.
    ///
    /// # Errors
    /// It cannot, or the model cannot hold its output to any form.
    pub(crate) fn check(
        &self,
        form: &OutputForm,
        tokenizer: &Arc<Tokenizer>,
        end_tokens: &[TokenId],
    ) -> Result<(), GrammarError> {
        let compiler = self.compiler.get_or_init(|| {
            let size = tokenizer.vocab_size();
            // Only the verdicts are needed.
            let limits = GrammarLimits {
                cached_grammars_max: 0,
                ..GrammarLimits::default()
            };
            GrammarCompiler::new(tokenizer.clone(), size, end_tokens, limits)
        });
        let (bytes, most) = (
            form.text.text_bytes(),
            GrammarLimits::default().form_bytes_max,
        );
        if bytes > most {
            let reason = format!("the form has {bytes} bytes, more than {most}");
            return Err(GrammarError::Refused(reason));
        }
        match compiler {
            Ok(compiler) => compiler.compile(form).map(|_| ()),
            Err(error) => Err(error.clone()),
        }
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}
