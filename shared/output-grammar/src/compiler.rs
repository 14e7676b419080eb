//! Compiles forms, and keeps what it compiled.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob};
use llguidance::{ParserFactory, panic_utils};
use parking_lot::Mutex;
use refrain_protocol::engine::OutputForm;
use refrain_protocol::{NamespaceId, TenantId};
use refrain_tokenization::Tokenizer;

use crate::cache::{Cache, CacheSize};
use crate::cache_key::CacheKey;
use crate::compiled::{CompiledGrammar, Outcome};
use crate::jobs::{Job, Jobs, Then};
use crate::lark::Context;
use crate::limits::GrammarLimits;
use crate::matcher::{GrammarStart, Layout};
use crate::parser::Parser;
use crate::source::Source;
use crate::threads::FormThreads;
use crate::vocabulary::Vocabulary;
use crate::{GrammarError, TokenId, place};

/// Compiles the forms of one model. It is shared by all requests.
pub struct GrammarCompiler {
    work: Arc<CompileWork>,
    threads: Arc<FormThreads>,
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
            step_max_items: limits.mask_items_max,
            max_items_in_row: limits.row_items_max,
            max_lexer_states: limits.states_max,
            // A large terminal is followed over the vocabulary once, within `compile_fuel`.
            precompute_large_lexemes: true,
            // Otherwise an error has the text of the output.
            verbose_errors: false,
        };
        let threads = FormThreads::new(limits.threads_max);
        Ok(GrammarCompiler {
            jobs: Arc::new(Jobs::new(threads.clone(), limits.waiting_forms_max)),
            threads,
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
        self.compile_for(TenantId::default(), NamespaceId::default(), form)
    }

    /// As [`GrammarCompiler::compile`], for a form of a namespace. Namespaces do not see each other's grammars, and
    /// tenants take turns.
    ///
    /// # Errors
    /// As [`GrammarCompiler::compile`].
    pub fn compile_for(
        &self,
        tenant: TenantId,
        namespace: NamespaceId,
        form: &OutputForm,
    ) -> Outcome {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.start(tenant, namespace, form, move |outcome| {
            let _ = sender.send(outcome);
        });
        let lost = GrammarError::NotNow("the form was not compiled");
        receiver.recv().unwrap_or(Err(lost))
    }

    /// Compiles a form on a thread of the compiler, and calls `then` there with the outcome, which it must not hold
    /// up. An outcome that is known is there at once. Forms that are equal are compiled once.
    pub fn start(
        &self,
        tenant: TenantId,
        namespace: NamespaceId,
        form: &OutputForm,
        then: impl FnOnce(Outcome) + Send + 'static,
    ) {
        match self.look_up(namespace, form) {
            Ok(outcome) => then(outcome),
            Err(key) => self.begin(tenant, key, form, Some(Box::new(then))),
        }
    }

    /// The outcome for a form, if it is known. Otherwise the form is compiled, and the caller asks again within a
    /// second. A form that nobody asks for again is dropped.
    pub fn poll(
        &self,
        tenant: TenantId,
        namespace: NamespaceId,
        form: &OutputForm,
    ) -> Option<Outcome> {
        let outcome = self.look_up(namespace, form);
        outcome
            .map_err(|key| self.begin(tenant, key, form, None))
            .ok()
    }

    fn begin(&self, tenant: TenantId, key: CacheKey, form: &OutputForm, then: Option<Then>) {
        let form = form.clone();
        let known = || self.work.cache.lock().outcome(&key);
        let work = self.work.clone();
        let compile = move |job: &Job| {
            let outcome = work.compile(&job.form);
            work.cache.lock().insert(job.key, &outcome);
            outcome
        };
        let job = Job { tenant, key, form };
        self.jobs.start(job, then, Instant::now(), known, compile);
    }

    /// Does other work for a tenant's form on a thread of the compiler, in the tenant's turn. The work is given back
    /// if there is no thread.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn work(
        &self,
        tenant: TenantId,
        work: Box<dyn FnOnce() + Send>,
    ) -> Result<(), Box<dyn FnOnce() + Send>> {
        self.threads.start(tenant, work)
    }

    /// The outcome for a form that was compiled lately, without any work.
    pub fn known(&self, namespace: NamespaceId, form: &OutputForm) -> Option<Outcome> {
        self.look_up(namespace, form).ok()
    }

    /// The outcome for a form, or the key of one that is not known.
    fn look_up(&self, namespace: NamespaceId, form: &OutputForm) -> Result<Outcome, CacheKey> {
        match self.key(namespace, form) {
            Ok(key) => self.work.cache.lock().outcome(&key).ok_or(key),
            Err(error) => Ok(Err(error)),
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

/// A grammar at its beginning, what may come first, the time that tokens take then, and about its bytes.
struct Start {
    parser: Parser,
    first: SimpleVob,
    token_time: Duration,
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
            token_time: start.token_time,
            bytes: start.bytes + size_of_val(start.first.as_slice()) + form.text.text_bytes(),
            start: Arc::new(GrammarStart {
                parser: Mutex::new(start.parser),
                first: start.first,
                layout: Layout {
                    opened_by: form.opened_by.filter(|_| form.after.is_some()),
                    free_parts: source.free_parts.clone(),
                    eos: self.eos.clone(),
                },
                work_max: self.limits.output_work_max,
            }),
        })
    }

    fn parse(&self, grammar: TopLevelGrammar) -> Result<Start, String> {
        let parser = self.parser(grammar)?;
        if !parser.parser.grammar().lexer_spec().can_rollback() {
            return Err("cannot go back".to_owned());
        }
        // The first text on a thread takes the tokenizer milliseconds, which are no fault of the form.
        let _ = self.tokenizer.encode_trusted("{\"a\": 1, \"b\": [");
        // A grammar without any text is found out by its first mask alone.
        let (parser, first, time) = Parser::begin(parser)?;
        Ok(Start {
            bytes: parser.bytes(),
            token_time: time.max(parser.try_tokens(&first)),
            parser,
            first,
        })
    }

    /// The library's parser, after a look at what its lexer does without a limit when it is made.
    fn parser(&self, grammar: TopLevelGrammar) -> Result<llguidance::TokenParser, String> {
        let limits = self.factory.limits();
        let env = Some(self.factory.tok_env().clone());
        let built = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let built = GrammarInit::Serialized(grammar).to_internal(env, limits.clone())?;
            let checked = check_first_bytes(&built.1, limits);
            Ok((built, checked))
        }));
        let ((grammar, lexer), checked) = built.map_err(|error| error.to_string())?;
        checked?;
        let init = GrammarInit::Internal(grammar, lexer);
        let parser = self.factory.create_parser_from_init_default(init);
        parser.map_err(|error| error.to_string())
    }
}

/// Tries the first bytes of all terminals, as the library's lexer does when it is made, but within the limits.
fn check_first_bytes(lexer: &LexerSpec, limits: &ParserLimits) -> Result<(), String> {
    let automaton = lexer.to_regex_vec(&mut limits.clone());
    let mut automaton = automaton.map_err(|error| error.to_string())?;
    automaton.set_fuel(limits.initial_lexer_fuel);
    automaton.set_max_states(limits.max_lexer_states);
    let start = automaton.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        automaton.transition(start, byte);
    }
    automaton.get_error().map_or(Ok(()), Err)
}
