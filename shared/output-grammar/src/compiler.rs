//! Compiles forms, and keeps what it compiled.

use std::fmt;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, earley::SlicedBiasComputer};
use parking_lot::Mutex;
use refrain_protocol::NamespaceId;
use refrain_protocol::engine::OutputForm;
use refrain_tokenization::Tokenizer;

use crate::cache::{Cache, CacheSize};
use crate::cache_key::CacheKey;
use crate::compiled::{CompiledGrammar, Outcome};
use crate::jobs::{Job, Jobs};
use crate::lark::Context;
use crate::limits::GrammarLimits;
use crate::matcher::Layout;
use crate::size::parser_bytes;
use crate::source::Source;
use crate::vocabulary::Vocabulary;
use crate::{GrammarError, TokenId, place};

/// Compiles the forms of one model. It is shared by all requests.
pub struct GrammarCompiler {
    work: Arc<CompileWork>,
    jobs: Arc<Jobs>,
}

/// The parts that compiling threads share.
struct CompileWork {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    eos: Vec<TokenId>,
    limits: GrammarLimits,
    cache: Mutex<Cache>,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut compiler = f.debug_struct("GrammarCompiler");
        compiler
            .field("limits", &self.work.limits)
            .finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for a model with `vocab_size` tokens, whose outputs end with one of `eos`.
    ///
    /// It takes as long as a look at every token: 6 ms for 4,000, and 0.3 s for 128,000.
    ///
    /// # Errors
    /// The model has no end token inside its vocabulary.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        vocab_size: u32,
        eos: &[TokenId],
        limits: GrammarLimits,
    ) -> Result<Self, GrammarError> {
        let env = Vocabulary::new(tokenizer.clone(), vocab_size, eos)?.into_env();
        let mut factory = ParserFactory::new(
            &env,
            InferenceCapabilities::default(),
            &SlicedBiasComputer::json_slices(),
        )
        .map_err(|_| GrammarError::Model("its vocabulary has no trie"))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: limits.compile_fuel,
            max_grammar_size: limits.symbols_max,
            step_lexer_fuel: limits.mask_fuel,
            max_lexer_states: limits.states_max,
            // Otherwise an error has the text of the output.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarCompiler {
            jobs: Arc::new(Jobs::new(
                limits.compile_threads_max,
                limits.waiting_forms_max,
            )),
            work: Arc::new(CompileWork {
                tokenizer,
                factory,
                eos: eos.to_vec(),
                cache: Mutex::new(Cache::new(&limits)),
                limits,
            }),
        })
    }

    /// The grammar of a form, from the cache if it was compiled lately. It waits until the form is compiled.
    ///
    /// # Errors
    /// The form cannot be compiled. The message says where, and has nothing else of the form's text. Or too many
    /// forms wait.
    pub fn compile(&self, form: &OutputForm) -> Outcome {
        self.compile_for(NamespaceId::default(), form)
    }

    /// As [`GrammarCompiler::compile`], for a form of a namespace. Namespaces do not see each other's grammars.
    ///
    /// # Errors
    /// As [`GrammarCompiler::compile`].
    pub fn compile_for(&self, namespace: NamespaceId, form: &OutputForm) -> Outcome {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.start(namespace, form, move |outcome| {
            let _ = sender.send(outcome);
        });
        let lost = GrammarError::NotNow("the form was not compiled");
        receiver.recv().unwrap_or(Err(lost))
    }

    /// Compiles a form on a thread of the compiler, and calls `then` there with the outcome, which it must not hold
    /// up. An outcome that is known is there at once. Forms that are equal are compiled once.
    pub fn start(
        &self,
        namespace: NamespaceId,
        form: &OutputForm,
        then: impl FnOnce(Outcome) + Send + 'static,
    ) {
        let key = match self.key(namespace, form) {
            Ok(key) => key,
            Err(error) => return then(Err(error)),
        };
        let outcome = self.work.cache.lock().outcome(&key);
        if let Some(outcome) = outcome {
            return then(outcome);
        }
        let form = form.clone();
        let known = || self.work.cache.lock().outcome(&key);
        let work = self.work.clone();
        let compile = move |job: &Job| {
            let outcome = work.compile(&job.form);
            work.cache.lock().insert(job.key, &outcome);
            outcome
        };
        let jobs = &self.jobs;
        jobs.start(Job { key, form }, Box::new(then), known, compile);
    }

    /// The outcome for a form that was compiled lately, without any work.
    pub fn known(&self, namespace: NamespaceId, form: &OutputForm) -> Option<Outcome> {
        match self.key(namespace, form) {
            Ok(key) => self.work.cache.lock().outcome(&key),
            Err(error) => Some(Err(error)),
        }
    }

    /// Whether a form of a namespace that was compiled lately can be compiled, without any work. This is known for
    /// longer than its grammar is kept.
    pub fn verdict(
        &self,
        namespace: NamespaceId,
        form: &OutputForm,
    ) -> Option<Result<(), GrammarError>> {
        match self.key(namespace, form) {
            Ok(key) => self.work.cache.lock().verdict(&key),
            Err(error) => Some(Err(error)),
        }
    }

    /// Number of forms that are compiled or wait for it.
    pub fn forms_waiting(&self) -> usize {
        self.jobs.waiting()
    }

    /// Number of calls so far that were refused because too many forms waited.
    pub fn forms_refused(&self) -> u64 {
        self.jobs.refused()
    }

    /// The forms that are kept now.
    pub fn cached(&self) -> CacheSize {
        self.work.cache.lock().size()
    }

    fn key(&self, namespace: NamespaceId, form: &OutputForm) -> Result<CacheKey, GrammarError> {
        CacheKey::new(namespace, form, self.work.limits.form_bytes_max)
    }
}

/// A grammar at its beginning, and about its bytes.
struct Start {
    matcher: llguidance::Matcher,
    bytes: usize,
}

impl CompileWork {
    fn compile(&self, form: &OutputForm) -> Outcome {
        let context = Context {
            tokenizer: &self.tokenizer,
            eos: &self.eos,
            limits: &self.limits,
        };
        let source = Source::new(context, form)?;
        self.build(form, &source).map(Arc::new)
    }

    fn build(&self, form: &OutputForm, source: &Source) -> Result<CompiledGrammar, GrammarError> {
        let start = self
            .parse(source.grammar.clone())
            .map_err(|message| place::locate(&message, source, |part| self.parse(part).err()))?;
        Ok(CompiledGrammar {
            bytes: start.bytes + form.text.text_bytes(),
            start: Arc::new(Mutex::new(start.matcher)),
            layout: Arc::new(Layout {
                opened_by: form.opened_by.filter(|_| form.after.is_some()),
                free_parts: source.free_parts.clone(),
                eos: self.eos.clone(),
            }),
        })
    }

    fn parse(&self, grammar: TopLevelGrammar) -> Result<Start, String> {
        let parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| error.to_string())?;
        if !parser.parser.grammar().lexer_spec().can_rollback() {
            return Err("cannot go back".to_owned());
        }
        let bytes = parser_bytes(&parser);
        let mut matcher = llguidance::Matcher::new(Ok(parser));
        // A grammar without any text is found out by its first mask alone.
        matcher
            .deep_clone()
            .compute_mask_or_eos()
            .map_err(|_| "no text".to_owned())?;
        match matcher.get_error() {
            Some(error) => Err(error),
            None => {
                matcher.invalidate_bias_cache();
                Ok(Start { matcher, bytes })
            }
        }
    }
}
