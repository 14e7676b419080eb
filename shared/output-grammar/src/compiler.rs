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

use crate::cache::{Cache, CacheKey};
use crate::jobs::{Job, Jobs};
use crate::matcher::{Layout, Matcher};
use crate::source::{Context, Source};
use crate::vocabulary::Vocabulary;
use crate::{GrammarError, TokenId, place};

/// The limits of compiling and matching.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Most bytes of a form's texts.
    pub form_bytes_max: usize,
    /// Most bytes of a grammar in Lark or EBNF.
    pub grammar_bytes_max: usize,
    /// Deepest nesting of a JSON schema.
    pub schema_depth_max: usize,
    /// Most subschemas of a JSON schema.
    pub subschemas_max: usize,
    /// Work that building a grammar's automaton may take, in units of which a core does about 50,000 per millisecond.
    pub compile_fuel: u64,
    /// Most symbols of a grammar.
    pub symbols_max: usize,
    /// Work that one mask may take, in units of which a core does about 14,000 per millisecond.
    pub mask_fuel: u64,
    /// Most states of the automaton of one output, each of 1 to 2 kB. A string with a `maxLength` takes one for each
    /// of its characters, so the default allows strings of 16,000 characters, and takes at most 40 MB for an output.
    pub states_max: usize,
    /// Most compiled grammars that are kept. With 0, only the verdicts are.
    pub cached_grammars_max: usize,
    /// Most bytes of the forms of those.
    pub cached_form_bytes_max: usize,
    /// Most forms that are compiled at once.
    pub compile_threads_max: usize,
    /// Most forms that wait to be compiled. A namespace may have a quarter of them.
    pub waiting_forms_max: usize,
}

impl Default for GrammarLimits {
    fn default() -> Self {
        GrammarLimits {
            form_bytes_max: 256 << 10,
            grammar_bytes_max: 64 << 10,
            schema_depth_max: 64,
            subschemas_max: 3_000,
            compile_fuel: 1_000_000,
            symbols_max: 200_000,
            mask_fuel: 200_000,
            states_max: 20_000,
            cached_grammars_max: 256,
            cached_form_bytes_max: 4 << 20,
            compile_threads_max: 2,
            waiting_forms_max: 64,
        }
    }
}

/// Compiles the forms of one model. It is shared by all requests.
pub struct GrammarCompiler {
    work: Arc<CompileWork>,
    jobs: Arc<Jobs>,
}

/// What the threads need that compile.
struct CompileWork {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    eos: Vec<TokenId>,
    limits: GrammarLimits,
    cache: Mutex<Cache>,
}

/// A compiled form, or why there is none.
pub type Outcome = Result<Arc<CompiledGrammar>, GrammarError>;

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut compiler = f.debug_struct("GrammarCompiler");
        compiler
            .field("limits", &self.work.limits)
            .finish_non_exhaustive()
    }
}

/// A compiled form.
pub struct CompiledGrammar {
    /// At its beginning. It is only cloned.
    start: Arc<Mutex<llguidance::Matcher>>,
    layout: Arc<Layout>,
}

impl CompiledGrammar {
    /// A matcher at the beginning of an output. Matchers share no state, so threads do not wait for each other.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.start.clone(), self.layout.clone())
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

    /// Whether a form that was compiled lately by [`GrammarCompiler::compile`] can be compiled, without any work.
    /// This is known for longer than its grammar is kept.
    pub fn verdict(&self, form: &OutputForm) -> Option<Result<(), GrammarError>> {
        match self.key(NamespaceId::default(), form) {
            Ok(key) => self.work.cache.lock().verdict(&key),
            Err(error) => Some(Err(error)),
        }
    }

    /// Number of forms that are compiled or wait for it.
    pub fn forms_waiting(&self) -> usize {
        self.jobs.waiting()
    }

    /// Numbers of grammars in the cache, and of bytes of their forms.
    pub fn cached(&self) -> (usize, usize) {
        self.work.cache.lock().size()
    }

    fn key(&self, namespace: NamespaceId, form: &OutputForm) -> Result<CacheKey, GrammarError> {
        CacheKey::new(namespace, form, self.work.limits.form_bytes_max)
    }
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
            start: Arc::new(Mutex::new(start)),
            layout: Arc::new(Layout {
                opened_by: form.opened_by.filter(|_| form.after.is_some()),
                free_parts: source.free_parts.clone(),
                eos: self.eos.clone(),
            }),
        })
    }

    fn parse(&self, grammar: TopLevelGrammar) -> Result<llguidance::Matcher, String> {
        let parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| error.to_string())?;
        if !parser.parser.grammar().lexer_spec().can_rollback() {
            return Err("cannot go back".to_owned());
        }
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
                Ok(matcher)
            }
        }
    }
}
