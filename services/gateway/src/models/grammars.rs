//! The compiler of forms for one model, which is made when a request first asks for a form.

use std::fmt;
use std::sync::{Arc, OnceLock};

use refrain_output_grammar::{GrammarCompiler, GrammarError, GrammarLimits};
use refrain_protocol::engine::OutputForm;
use refrain_protocol::{NamespaceId, TenantId, TokenId};
use refrain_tokenization::Tokenizer;

/// Compiles the forms of a model, to learn whether its engine can.
#[derive(Default)]
pub(crate) struct Grammars {
    compiler: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

/// The model whose forms are compiled.
pub(crate) struct FormModel<'a> {
    pub(crate) tokenizer: &'a Arc<Tokenizer>,
    pub(crate) end_tokens: &'a [TokenId],
}

impl Grammars {
    /// Whether a form of a namespace that was judged lately can be compiled. `None`: it was not.
    pub(crate) fn known(
        &self,
        namespace: NamespaceId,
        form: &OutputForm,
    ) -> Option<Result<(), GrammarError>> {
        match self.compiler.get()? {
            Ok(compiler) => compiler.verdict(namespace, form),
            Err(error) => Some(Err(error.clone())),
        }
    }

    /// Whether a form of a namespace can be compiled. It takes milliseconds, and the first call up to half a second.
    ///
    /// # Errors
    /// It cannot, or the model cannot hold its output to any form.
    pub(crate) fn check(
        &self,
        tenant: TenantId,
        namespace: NamespaceId,
        form: &OutputForm,
        model: &FormModel<'_>,
    ) -> Result<(), GrammarError> {
        let compiler = self.compiler.get_or_init(|| {
            // Only the verdicts are needed.
            let limits = GrammarLimits {
                cached_bytes_max: 0,
                ..GrammarLimits::default()
            };
            let size = model.tokenizer.vocab_size();
            GrammarCompiler::new(model.tokenizer.clone(), size, model.end_tokens, limits)
        });
        match compiler {
            Ok(compiler) => compiler.compile_for(tenant, namespace, form).map(|_| ()),
            Err(error) => Err(error.clone()),
        }
    }

    /// Number of verdicts that are kept.
    pub(crate) fn verdicts(&self) -> usize {
        let compiler = self
            .compiler
            .get()
            .and_then(|compiler| compiler.as_ref().ok());
        compiler.map_or(0, |compiler| compiler.cached().verdicts)
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}
