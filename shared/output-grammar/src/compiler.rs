//! Compiles forms, and keeps what it compiled.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, earley::SlicedBiasComputer};
use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::engine::OutputForm;
use refrain_tokenization::Tokenizer;

use crate::matcher::{Layout, Matcher};
use crate::source::{Context, Source};
use crate::vocabulary::Vocabulary;
use crate::{GrammarError, TokenId, place};

/// Stack of a thread that compiles. References nest as deeply as a schema has them, and rules as a grammar has them.
const STACK_BYTES: usize = 512 << 20;

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
    /// Most states of the automaton of one output, each of 1 to 2 kB.
    pub states_max: usize,
    /// Most compiled grammars that are kept.
    pub cached_grammars_max: usize,
    /// Most bytes of the forms of those.
    pub cached_form_bytes_max: usize,
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
            states_max: 50_000,
            cached_grammars_max: 256,
            cached_form_bytes_max: 4 << 20,
        }
    }
}

/// Compiles the forms of one model. It is shared by all requests.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    factory: ParserFactory,
    eos: Vec<TokenId>,
    limits: GrammarLimits,
    cache: Mutex<Cache>,
}

/// A compiled form, or why there is none.
pub type Outcome = Result<Arc<CompiledGrammar>, GrammarError>;

struct Cache {
    /// Refusals are kept too, so that a bad form costs its work once.
    outcomes: LruCache<String, Outcome>,
    bytes: usize,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut compiler = f.debug_struct("GrammarCompiler");
        compiler
            .field("limits", &self.limits)
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
        let count = NonZeroUsize::new(limits.cached_grammars_max).unwrap_or(NonZeroUsize::MIN);
        Ok(GrammarCompiler {
            tokenizer,
            factory,
            eos: eos.to_vec(),
            limits,
            cache: Mutex::new(Cache {
                outcomes: LruCache::new(count),
                bytes: 0,
            }),
        })
    }

    /// The grammar of a form, from the cache if it was compiled lately.
    ///
    /// # Errors
    /// The form cannot be compiled. The message says where, and has nothing else of the form's text.
    pub fn compile(&self, form: &OutputForm) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let key = serde_json::to_string(form)
            .map_err(|error| GrammarError::refused(error.to_string()))?;
        if key.len() > self.limits.form_bytes_max {
            return Err(GrammarError::refused(format!(
                "the form has {} bytes, more than {}",
                key.len(),
                self.limits.form_bytes_max
            )));
        }
        if let Some(outcome) = self.cache.lock().outcomes.get(&key) {
            return outcome.clone();
        }
        let context = Context {
            tokenizer: &self.tokenizer,
            eos: &self.eos,
            limits: &self.limits,
        };
        let built = Source::new(context, form)
            .and_then(|source| self.on_deep_stack(|| self.build(form, &source)));
        let outcome = built.map(Arc::new);
        let bytes_max = self.limits.cached_form_bytes_max;
        self.cache.lock().insert(key, outcome.clone(), bytes_max);
        outcome
    }

    /// The outcome of [`GrammarCompiler::compile`] for a form that was compiled lately, without any work.
    pub fn known(&self, form: &OutputForm) -> Option<Outcome> {
        let key = serde_json::to_string(form).ok()?;
        self.cache.lock().outcomes.get(&key).cloned()
    }

    fn on_deep_stack<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, GrammarError> + Send,
    ) -> Result<T, GrammarError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, work).map_err(|_| {
                GrammarError::refused("no thread could be started to compile the form")
            })?;
            let failed = |_| Err(GrammarError::refused("the form cannot be compiled"));
            thread.join().unwrap_or_else(failed)
        })
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

impl Cache {
    fn insert(&mut self, key: String, outcome: Outcome, bytes_max: usize) {
        self.bytes += key.len();
        if let Some((replaced, _)) = self.outcomes.push(key, outcome) {
            self.bytes -= replaced.len();
        }
        while self.bytes > bytes_max && self.outcomes.len() > 1 {
            let Some((oldest, _)) = self.outcomes.pop_lru() else {
                break;
            };
            self.bytes -= oldest.len();
        }
    }
}
