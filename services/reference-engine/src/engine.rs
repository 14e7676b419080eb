//! Engine steps: checks the items, drafts, runs one forward pass, and verifies the drafts.
//!
//! This folder has no clock and no threads. The caller passes `now`, and a single owner makes all calls.

mod form_pace;
mod form_slot;
mod limits;
mod planned_item;
mod pooling;
mod prefix_cache;
mod session;
mod session_form;
mod sessions;
mod target;
mod verification;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_output_grammar::GrammarCompiler;
use refrain_protocol::engine::{
    CloseRequest, SelfDraft, SessionSpec, StepItem, StepRequest, StepResult,
};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TenantId};

use crate::config::EngineConfig;
use crate::drafter::{DraftForm, DraftNetwork, DraftRequest, DraftRows, Drafter};
use crate::model::Model;
use crate::network::{BLOCK_TOKENS, Branch};
use crate::pool::{KvPool, WeightsIdentity};
use crate::sampler::Sampler;

use form_pace::FormPace;
use form_slot::FormSlot;
use limits::{StepLimits, unknown_session};
use planned_item::PlannedItem;
use pooling::Pooling;
use session::Session;
use session_form::{
    FormFault, MaskTask, MaskThreads, SessionForm, compiling, form_error, lost, working,
    working_on_opening,
};
use sessions::{SessionTimes, Sessions};
use target::Target;

pub(crate) use pooling::KV_LOADING;
pub(crate) use session_form::FORM_WORKING;
pub(crate) use target::LoadedModel;

/// Time after which a form is given up whose session was to open and was not asked for again. Callers wait a second
/// at most.
const OPENING_FORM_IDLE_MAX: Duration = Duration::from_secs(10);

/// The results of a step, and the work that it took.
#[derive(Debug)]
pub(crate) struct StepReport {
    pub(crate) results: Vec<StepResult>,
    /// Number of rows that were computed.
    pub(crate) computed_tokens: usize,
    /// Number of them that read a context, beyond the one row of each session that decodes.
    pub(crate) prefilled_tokens: usize,
    /// Numbers of rows that the drafter computed.
    pub(crate) draft_rows: DraftRows,
    /// Number of tokens whose captured states were dropped before the head had read them.
    pub(crate) states_dropped: u64,
    /// Number of emitted tokens that were taken as the likeliest while another was about as likely.
    pub(crate) near_ties: u64,
}

/// A batch between the phases of a step. If it is dropped, its sessions are lost.
pub(crate) struct PlannedBatch {
    results: Vec<Option<StepResult>>,
    work: Vec<(PlannedItem, Session)>,
    draft_rows: DraftRows,
}

/// The model, its drafter and its sessions.
#[derive(Debug)]
pub(crate) struct EngineCore {
    target: Target,
    limits: StepLimits,
    drafter: Option<Drafter>,
    sampler: Sampler,
    sessions: Sessions,
    /// Compiles the forms of outputs, if the model has a tokenizer.
    grammars: Option<Arc<GrammarCompiler>>,
    /// Whether costly work of forms is done beside the steps.
    forms_leave: bool,
    /// Forms of sessions that are yet to open, which threads work on, with the time when they were asked for.
    opening_forms: HashMap<EngineSessionId, (FormSlot, Instant)>,
    /// The threads that make masks during a forward pass.
    mask_threads: MaskThreads,
}

#[cfg(test)]
impl PlannedBatch {
    /// Returns the draft of each valid item.
    pub(crate) fn drafts(&self) -> Vec<&refrain_protocol::engine::Draft> {
        self.work.iter().map(|(item, _)| &item.draft).collect()
    }
}

impl EngineCore {
    /// Creates an engine without sessions. `network`, if there is one, drafts for `model`.
    pub(crate) fn new(
        model: impl Into<LoadedModel>,
        network: Option<Box<dyn DraftNetwork>>,
        config: &EngineConfig,
    ) -> Self {
        let model = model.into();
        let rows_max = config.max_step_tokens as usize;
        let drafter = network.map(|network| Drafter::new(network, rows_max));
        let captured_layers = drafter
            .as_ref()
            .map_or(&[][..], Drafter::captured_layers)
            .to_vec();
        let window = config.eagle3_window_tokens;
        let state_shape =
            |drafter: &Drafter| drafter.state_shape(model.own().map(Arc::as_ref), window);
        let drafter_shape = drafter.as_ref().map(state_shape);
        let model_max = model.max_context();
        let limits = StepLimits {
            vocab_size: model.vocab_size(),
            max_context: config.max_context.unwrap_or(model_max).min(model_max),
            max_batch: config.max_batch,
            max_step_tokens: config.max_step_tokens,
            max_draft_tokens: config.max_draft_tokens,
            drafter: drafter.as_ref().map(Drafter::capabilities),
        };
        let kv_shape = model.kv_shape();
        let target = Target::new(model, &captured_layers, config.threads);
        EngineCore {
            limits,
            drafter,
            sampler: Sampler::default(),
            sessions: Sessions::new(
                kv_shape,
                drafter_shape,
                config.max_sessions as usize,
                config.kv_tokens_max,
                SessionTimes {
                    idle: Duration::from_millis(config.session_idle_ms),
                    parked: Duration::from_millis(config.session_parked_ms),
                },
            )
            .with_backend(target.backend().cloned()),
            target,
            grammars: None,
            forms_leave: false,
            opening_forms: HashMap::new(),
            // If the forward pass takes all cores, masks would only wait for it.
            mask_threads: MaskThreads::new(
                std::thread::available_parallelism()
                    .map_or(0, |cores| cores.get().saturating_sub(config.threads)),
            ),
        }
    }

    /// The engine with a compiler for the forms of outputs.
    pub(crate) fn with_grammars(self, grammars: Option<Arc<GrammarCompiler>>) -> Self {
        EngineCore { grammars, ..self }
    }

    /// The engine whose steps do not wait for costly work of forms. Their items come again.
    pub(crate) fn with_leaving_forms(self) -> Self {
        EngineCore {
            forms_leave: true,
            ..self
        }
    }

    /// The engine with a pool of KV blocks. `version` is that of the weights.
    pub(crate) fn with_pool(mut self, pool: Option<Arc<KvPool>>, version: u64) -> Self {
        if let (Some(pool), Some(weights)) = (pool, self.weights_identity(version)) {
            self.sessions.set_pooling(Pooling { pool, weights });
        }
        self
    }

    /// The identity of the weights, by which the pool names blocks. `None`: a backend has them.
    pub(crate) fn weights_identity(&self, version: u64) -> Option<WeightsIdentity> {
        let model = self.target.own()?;
        Some(WeightsIdentity {
            fingerprint: model.fingerprint(),
            version,
        })
    }

    /// Sets how many threads make masks during a forward pass.
    #[cfg(test)]
    pub(crate) fn set_mask_threads(&mut self, threads: usize) {
        self.mask_threads = MaskThreads::new(threads);
    }

    /// The signals that end the work on the forms of sessions that are yet to open.
    #[cfg(test)]
    pub(crate) fn stops_of_opening_forms(&self) -> Vec<refrain_output_grammar::StopSignal> {
        let slots = self.opening_forms.values();
        slots.filter_map(|(slot, _)| slot.stop_of_away()).collect()
    }

    pub(crate) fn limits(&self) -> StepLimits {
        self.limits
    }

    /// Compiles the forms of outputs, if the model has a tokenizer.
    pub(crate) fn grammars(&self) -> Option<&GrammarCompiler> {
        self.grammars.as_deref()
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Closes sessions. Unknown ones are ignored.
    pub(crate) fn close(&mut self, request: &CloseRequest) {
        for id in &request.sessions {
            self.opening_forms.remove(id);
            self.sessions.close(*id, request.keep_kv);
        }
    }

    /// Parks sessions, whose requests go on soon. Unknown ones are ignored.
    pub(crate) fn park(&mut self, sessions: &[EngineSessionId], now: Instant) {
        for id in sessions {
            self.sessions.park(*id, now);
        }
    }

    /// Forgets the sessions that are kept for reuse.
    pub(crate) fn forget_kept(&mut self) {
        self.sessions.forget_kept();
    }

    /// Forgets the sessions of a tenant, except running ones. Returns the number of the former and of the latter.
    pub(crate) fn forget_tenant(&mut self, tenant: TenantId, now: Instant) -> (usize, usize) {
        self.sessions.forget_tenant(tenant, now)
    }

    /// Forgets all sessions. Their callers open them again.
    pub(crate) fn forget_all(&mut self) {
        self.sessions.forget_all();
    }

    /// Goes on with weights of another version, and of another model of the same architecture where there is one. No
    /// session may be left, since their KV is of the old ones.
    pub(crate) fn renew(&mut self, model: Option<Arc<Model>>, version: u64) {
        debug_assert_eq!(self.sessions.counts(), (0, 0));
        if let Some(model) = model {
            self.target.replace(model);
        }
        if self.sessions.has_pool()
            && let Some(weights) = self.weights_identity(version)
        {
            self.sessions.renew_pooling(weights);
        }
    }

    /// Reports the KV cache, without the price of reading.
    pub(crate) fn kv_report(&mut self) -> KvReport {
        self.sessions.kv_report()
    }

    /// Takes the number of parked sessions that made room for others since the last call.
    pub(crate) fn take_parked_evicted(&mut self) -> u64 {
        self.sessions.take_parked_evicted()
    }

    /// Closes idle sessions, and returns their number.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        let is_wanted =
            |asked: Instant| now.saturating_duration_since(asked) <= OPENING_FORM_IDLE_MAX;
        self.opening_forms.retain(|_, (_, asked)| is_wanted(*asked));
        self.sessions.expire(now)
    }

    /// Checks a batch, and takes its sessions out of the table.
    ///
    /// # Errors
    /// `InvalidRequest` if the batch as a whole breaks a limit. The fault of a single item becomes that item's
    /// result. It leaves the session unchanged, or cut to `keep_len` tokens.
    pub(crate) fn begin(
        &mut self,
        request: StepRequest,
        now: Instant,
    ) -> Result<PlannedBatch, ApiError> {
        self.limits.check_batch(&request)?;
        let mut results: Vec<Option<StepResult>> = Vec::new();
        let mut items = Vec::new();
        let mut blocks = 0;
        // No item may take the room of a session that a later item goes on with.
        for item in &request.items {
            self.sessions.resume(item.session);
        }
        for (index, item) in request.items.into_iter().enumerate() {
            match self.plan(index, item, &mut blocks, now) {
                Ok(item) => {
                    items.push(item);
                    results.push(None);
                }
                Err(error) => results.push(Some(Err(error))),
            }
        }
        self.reserve_for_drafter(&mut items, blocks);
        // Sessions stay in the table until here, because other items of the batch may reuse their KV.
        let mut work: Vec<(PlannedItem, Session)> = Vec::with_capacity(items.len());
        for item in items {
            match self.sessions.take(item.id) {
                Some(mut session) => {
                    session.kv.grow(item.start + item.chain.len());
                    let mut item = item;
                    let text_len = session.text.len();
                    if let Some(form) = session.form_mut() {
                        item.cut(form, text_len);
                    }
                    work.push((item, session));
                }
                None => results[item.index] = Some(Err(unknown_session(item.id))),
            }
        }
        Ok(PlannedBatch {
            results,
            work,
            draft_rows: DraftRows::default(),
        })
    }

    /// Makes the drafts that items request from the engine. Returns whether there were any.
    pub(crate) fn draft(&mut self, batch: &mut PlannedBatch) -> bool {
        let Some(drafter) = &mut self.drafter else {
            return false;
        };
        let mut requests = Vec::new();
        for (item, session) in &mut batch.work {
            if let (Some(options), Some(state)) = (item.self_draft, &mut session.drafter_state) {
                let form = session.form.as_mut().and_then(FormSlot::here);
                let form = form.filter(|form| form.binds(session.text.len()));
                requests.push(DraftRequest {
                    text: &session.text,
                    state,
                    options,
                    sampling: &session.sampling,
                    form: form.map(|form| -> &mut dyn DraftForm { form }),
                });
            }
        }
        if requests.is_empty() {
            return false;
        }
        let (drafts, rows) = match drafter.draft(self.target.own().map(Arc::as_ref), requests) {
            Ok(drafted) => drafted,
            Err(reason) => {
                tracing::warn!(reason, "a step goes on without the engine's own drafts");
                let states = batch.work.iter_mut();
                let states = states.filter_map(|(_, session)| session.drafter_state.as_mut());
                states.for_each(|state| state.keep_rows(0));
                return false;
            }
        };
        batch.draft_rows = rows;
        let mut drafts = drafts.into_iter();
        for (item, session) in &mut batch.work {
            if item.self_draft.is_some() && session.drafter_state.is_some() {
                item.merge(drafts.next().unwrap_or_default());
            }
        }
        true
    }

    /// Runs one forward pass over the batch, and verifies its drafts.
    pub(crate) fn verify(&mut self, batch: PlannedBatch, now: Instant) -> StepReport {
        let PlannedBatch {
            mut results,
            mut work,
            draft_rows,
        } = batch;
        if let Some(backend) = self.target.backend() {
            let mut free = backend.free();
            work.iter_mut()
                .for_each(|(item, _)| item.cut_branches(&mut free));
        }
        let mut branches: Vec<Branch<'_>> = Vec::with_capacity(work.len());
        let mut tasks = Vec::new();
        for (item, session) in &mut work {
            let item = &*item;
            let form = session.form.as_mut().and_then(FormSlot::here);
            if let (true, Some(form)) = (item.sample, form) {
                tasks.push(MaskTask {
                    form,
                    draft: &item.draft,
                    computed: &item.computed,
                    text_len: session.text.len(),
                });
            }
            branches.push(Branch {
                nodes: &item.nodes,
                parents: &item.parents,
                wants_logits: item.sample,
                wants_states: session.drafter_state.is_some(),
                ..Branch::new(&mut session.kv, item.start, &item.chain)
            });
        }
        let pass = self
            .mask_threads
            .beside(tasks, || self.target.run(&mut branches));
        let mut report = StepReport {
            results: Vec::new(),
            computed_tokens: 0,
            prefilled_tokens: 0,
            draft_rows,
            states_dropped: 0,
            near_ties: 0,
        };
        let pass = match pass {
            Ok(pass) => pass,
            Err(reason) => {
                let error = not_computed(&reason);
                let result =
                    |result: Option<StepResult>| result.unwrap_or_else(|| Err(error.clone()));
                report.results = results.into_iter().map(result).collect();
                return report;
            }
        };
        for (branch, (item, mut session)) in work.into_iter().enumerate() {
            report.computed_tokens += item.chain.len() + item.nodes.len();
            report.prefilled_tokens += item.chain.len().saturating_sub(1);
            let output = verification::emit(&mut self.sampler, &pass, branch, &item, &mut session);
            let output = match output {
                Ok(output) => Ok(output),
                Err(FormFault::Later) => Err(working()),
                // The session is lost: its output cannot go on.
                Err(FormFault::Failed(error)) => {
                    results[item.index] = Some(Err(form_error(&error)));
                    continue;
                }
            };
            if let (Some(slot), Some(grammars)) = (&mut session.form, &self.grammars) {
                slot.leave(session.tenant, grammars);
            }
            if let Some(state) = &mut session.drafter_state {
                report.states_dropped += state.take_dropped();
            }
            self.sessions.put(item.id, session, now);
            if item.opened && output.is_err() {
                self.reopen_later(item.id, now);
            }
            results[item.index] = Some(output);
        }
        report.near_ties = self.sampler.take_near_ties();
        report.results = results
            .into_iter()
            .map(|result| {
                result
                    .unwrap_or_else(|| Err(ApiError::internal("an item was left without a result")))
            })
            .collect();
        report
    }

    /// Checks an item, and brings its session's text up to date. `blocks` counts the KV blocks that earlier items of
    /// the batch will allocate.
    fn plan(
        &mut self,
        index: usize,
        mut item: StepItem,
        blocks: &mut u64,
        now: Instant,
    ) -> Result<PlannedItem, ApiError> {
        let id = item.session;
        let text_len = self
            .limits
            .check_item(index, &item, self.sessions.get(id))?;
        let opened = item.open.is_some();
        let ahead = item
            .open
            .as_mut()
            .map(|spec| std::mem::take(&mut spec.ahead));
        let ahead_max = self.limits.max_context as usize - text_len;
        if let Some(spec) = item.open {
            let mut form = self.form(id, &spec, item.tokens.len(), now)?;
            if let Err(error) = self.sessions.open(id, spec, &mut form, now) {
                // The item comes again, and the form may have followed a long output already.
                self.opening_forms
                    .extend(form.map(|form| (id, (form, now))));
                return Err(error);
            }
        }
        let session = self
            .sessions
            .get_mut(id)
            .ok_or_else(|| unknown_session(id))?;
        let keep = item.keep_len as usize;
        let is_greedy = session.sampling.temperature == 0.0;
        if session.form.as_mut().is_some_and(FormSlot::is_away) {
            return Err(working());
        }
        if session.form.as_ref().is_some_and(FormSlot::is_lost) {
            self.sessions.close(id, false);
            return Err(lost());
        }
        if let Err(error) = session.replace_text(keep, &item.tokens) {
            self.sessions.close(id, false);
            return Err(form_error(&error));
        }
        if let (Some(slot), Some(grammars)) = (&mut session.form, &self.grammars)
            && slot.leave(session.tenant, grammars)
        {
            if opened {
                self.reopen_later(id, now);
                return Err(working_on_opening(item.tokens.len()));
            }
            return Err(working());
        }
        // The search for a shared prefix pays from about a block of tokens on. Shorter pieces are computed.
        let (mut cached_tokens, mut pooled_tokens) = (0, 0);
        if opened || text_len > session.kv.len() + BLOCK_TOKENS {
            cached_tokens = self.sessions.reuse(id);
            let ahead = ahead
                .as_ref()
                .map(|ahead| &ahead[..ahead.len().min(ahead_max)]);
            pooled_tokens = match self.sessions.continue_from_pool(id, ahead, now) {
                Ok(gained) => gained,
                Err(error) => {
                    // Only new sessions wait. The item opens it again.
                    self.reopen_later(id, now);
                    return Err(error);
                }
            };
            cached_tokens += pooled_tokens;
        }
        let draft = item.draft.unwrap_or_default();
        let max_emit = (item.max_emit as usize).min(self.limits.max_context as usize - text_len);
        let self_draft = item
            .self_draft
            .map(|wanted| SelfDraft {
                // A node at depth d matters for token d + 1 of the output.
                depth: wanted.depth.min(max_emit.saturating_sub(1) as u32),
                sampled: wanted.sampled && !is_greedy,
                ..wanted
            })
            .filter(|options| options.depth > 0 && options.tokens_max > 0);
        let accepted_max = self_draft
            .map_or(0, |options| options.depth as usize)
            .max(draft.tokens.len());
        let needed = self.sessions.get(id).map_or(0, |session| {
            session.kv.growth_blocks(text_len + accepted_max)
        });
        if let Err(error) = self.sessions.reserve(*blocks + needed, 0) {
            if opened {
                self.reopen_later(id, now);
            } else if let Some(session) = self.sessions.get_mut(id) {
                // Going back to a text that had the form before always succeeds.
                let _ = session.replace_text(keep, &[]);
            }
            return Err(error);
        }
        *blocks += needed;
        let session = self
            .sessions
            .get_mut(id)
            .ok_or_else(|| unknown_session(id))?;
        if let Some(pooled) = session.pooled.as_mut().filter(|_| item.sample) {
            pooled.is_read = false;
        }
        let start = session.kv.len();
        let end = match item.sample {
            true => text_len,
            // The rest of a block that the pool may have is left to the next piece of the text.
            false if pooled_tokens > 0 && text_len - start <= BLOCK_TOKENS => start,
            false => text_len - 1,
        };
        let chain = session.text[start..end].to_vec();
        let mut item = PlannedItem {
            index,
            id,
            opened,
            cached_tokens,
            start,
            chain,
            sample: item.sample,
            max_emit,
            computed: Vec::with_capacity(draft.tokens.len()),
            nodes: Vec::new(),
            parents: Vec::new(),
            received_nodes: draft.tokens.len(),
            allowed: Vec::new(),
            draft,
            self_draft,
            agreed_nodes: Vec::new(),
            drawn_from: Vec::new(),
        };
        item.select_nodes();
        Ok(item)
    }

    /// Closes a session whose item comes again and opens it then. Its form is kept for that.
    fn reopen_later(&mut self, id: EngineSessionId, now: Instant) {
        let session = self.sessions.get_mut(id);
        if let Some(slot) = session.and_then(|session| session.form.take()) {
            self.opening_forms.insert(id, (slot, now));
        }
        self.sessions.close(id, false);
    }

    /// The form of a new session's output, if it must have one.
    fn form(
        &mut self,
        id: EngineSessionId,
        spec: &SessionSpec,
        text_len: usize,
        now: Instant,
    ) -> Result<Option<FormSlot>, ApiError> {
        let Some(form) = &spec.sampling.form else {
            return Ok(None);
        };
        let start = spec.prompt_len as usize + spec.sampling.forced_output.len();
        if let Some((mut slot, _)) = self.opening_forms.remove(&id) {
            if slot.is_away() {
                self.opening_forms.insert(id, (slot, now));
                return Err(working_on_opening(text_len));
            }
            if slot.here().is_some_and(|form| form.start() == start) {
                return Ok(Some(slot));
            }
        }
        let Some(grammars) = &self.grammars else {
            let message = "this engine's model has no tokenizer or no end token, so outputs cannot be held to a form";
            return Err(ApiError::invalid("sampling.form", message).with_code("output_form"));
        };
        // To compile takes milliseconds to seconds, in which the other requests of the batch go on.
        let Some(outcome) = grammars.poll(spec.tenant, spec.namespace, form) else {
            return Err(compiling());
        };
        let grammar = outcome.map_err(|error| form_error(&error))?;
        let matcher = grammar.matcher().with_stops(&spec.sampling.stop_token_ids);
        let pace = self
            .forms_leave
            .then(|| FormPace::after_trial(grammar.token_time()));
        let form = SessionForm::new(matcher, start, pace);
        Ok(Some(FormSlot::new(form)))
    }

    /// Makes room for the rows that the drafter will compute, after `blocks` for the target. An item without room
    /// loses its draft, which does not change its output.
    fn reserve_for_drafter(&mut self, items: &mut [PlannedItem], blocks: u64) {
        let mut draft_blocks = 0;
        for item in items.iter_mut().filter(|item| item.self_draft.is_some()) {
            let needed = self.sessions.get_mut(item.id).map_or(0, |session| {
                session.drafter_state.as_mut().map_or(0, |state| {
                    let rows = state.missing_rows(session.text.len());
                    state.growth_blocks(&rows)
                })
            });
            match self.sessions.reserve(blocks, draft_blocks + needed) {
                Ok(()) => draft_blocks += needed,
                Err(_) => item.self_draft = None,
            }
        }
    }
}

/// The error of the items of a step that a backend did not compute. Their sessions are lost.
fn not_computed(reason: &str) -> ApiError {
    tracing::error!(reason, "a step was not computed; its sessions are lost");
    // A worker opens the session again with the whole text, a few times.
    ApiError::new(
        ErrorKind::NotFound,
        format!("the model did not compute this step, and the session is lost: {reason}"),
    )
    .with_code("engine_step_failed")
}
