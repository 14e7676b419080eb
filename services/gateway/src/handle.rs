//! The gateway as other listeners of its process use it. They read requests in their own words and answer them with
//! writers of their own; all between is the way of every request.

use std::sync::Arc;
use std::time::Instant;

use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use prometheus::IntGauge;
use refrain_accounts::Accounts;
use refrain_accounts::tenants::Caller;
use refrain_protocol::openai::ModelList;
use refrain_protocol::scheduling::ServedModel;
use refrain_protocol::{ApiError, TenantName};
use refrain_service_kit::drain::Drain;
use refrain_service_kit::http::{AccessNote, Readiness};

use crate::http::{EnteredRequest, GatewayState, finish, generate};
use crate::models::KnownWeights;
use crate::request::{ParsedRequest, RequestReader};
use crate::response::SurfaceWriter;
use crate::surfaces::{ResponseStore, Surface};

/// A limit of the gateway, in the order in which a request meets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bodies that are parsed and tokenized.
    Parsing,
    /// Forms of outputs that are compiled.
    Forms,
    /// Rollouts in flight, of the gateway and of the tenant.
    Admission,
    /// Requests of the tenant, at once and per minute.
    Requests,
    /// Tokens of the tenant per minute.
    Tokens,
}

impl Limit {
    /// Number of limits.
    pub const COUNT: usize = 5;
}

/// The line of a listener whose requests wait where those of clients are refused.
pub trait WaitingLine {
    /// The room of a request at the listener, until the request ends.
    type Room;

    /// Makes an attempt, and further ones for as long as the limit is reached that may have room later.
    ///
    /// # Errors
    /// Any other error of an attempt, or the line's patience has ended.
    fn until_room<T>(
        &self,
        limit: Limit,
        attempt: impl AsyncFnMut() -> Result<T, ApiError>,
    ) -> impl Future<Output = Result<T, ApiError>>;

    /// Waits for the room of a request with so many choices.
    ///
    /// # Errors
    /// The line's patience has ended.
    fn room(&self, choices: usize) -> impl Future<Output = Result<Self::Room, ApiError>>;
}

/// A gateway, for other listeners of its process. Cheap to clone.
#[derive(Clone)]
pub struct GatewayHandle {
    gateway: Arc<GatewayState>,
    drain: Drain,
}

impl GatewayHandle {
    pub(crate) fn new(gateway: Arc<GatewayState>, drain: Drain) -> Self {
        GatewayHandle { gateway, drain }
    }

    pub(crate) fn state(&self) -> &Arc<GatewayState> {
        &self.gateway
    }

    /// The caller that everybody is on a listener of this tenant.
    ///
    /// # Errors
    /// `Forbidden` for a tenant that nobody has added, or `Unavailable` if nobody knows yet.
    pub fn caller(&self, tenant: &TenantName) -> Result<Caller, ApiError> {
        self.gateway.accounts.caller_of_listener(tenant)
    }

    /// Reads a body with `read`. A large one waits for its turn.
    ///
    /// # Errors
    /// Those of `read`, and of the line.
    pub async fn read<T: Send + 'static>(
        &self,
        tenant: &str,
        body: &Bytes,
        received: Instant,
        line: &impl WaitingLine,
        read: impl Fn(&RequestReader<'_>, Bytes) -> Result<T, ApiError> + Clone + Send + 'static,
    ) -> Result<T, ApiError> {
        let parse = async || {
            let read = read.clone();
            let read = move |_: &GatewayState, reader: &RequestReader<'_>, body| read(reader, body);
            let parsed = self.gateway.parse(tenant, body.clone(), received, read);
            parsed.await
        };
        line.until_room(Limit::Parsing, parse).await
    }

    /// Waits until every limit has room for a request, unless it is aborted before. Only the request that comes back
    /// can be carried out. It holds its room at the listener, if it has any.
    ///
    /// # Errors
    /// The request asks for what cannot be done, or the line's patience has ended.
    pub async fn enter<L: WaitingLine>(
        &self,
        mut request: ParsedRequest,
        caller: &Caller,
        line: &L,
    ) -> Result<(EnteredRequest, Option<L::Room>), ApiError> {
        let (gateway, asked) = (&self.gateway, &mut request);
        let abort = asked.abort.clone().unwrap_or_default();
        let enter = async {
            let judge = async || gateway.judge(asked, caller).await;
            line.until_room(Limit::Forms, judge).await?;
            let choices = asked.choice_count();
            let room = line.room(choices).await?;
            let class = caller.policy.class(asked.asked_class);
            let admit = async || {
                let mut ticket = gateway.admission.admit(&caller.tenant)?;
                ticket.decide(class, choices)?;
                Ok(ticket)
            };
            let ticket = line.until_room(Limit::Admission, admit).await?;
            let begin = async || gateway.accounts.begin(caller, Instant::now()).await;
            let mut quota = line.until_room(Limit::Requests, begin).await?;
            let reserve = async || gateway.reserve(asked, &mut quota).await;
            let reserved = line.until_room(Limit::Tokens, reserve).await?;
            let begun = gateway.begin(asked, caller, ticket, quota, reserved);
            Ok((begun.await?, room))
        };
        let entered = abort.run_until_cancelled(enter).await.transpose()?;
        let (admitted, room) = entered.unzip();
        Ok((EnteredRequest::new(request, caller, admitted), room))
    }

    /// Carries a request out and answers it, whole or as a stream.
    ///
    /// # Errors
    /// The error of the request, if it has one before the head of the answer is sent.
    pub async fn answer(
        &self,
        entered: EnteredRequest,
        writer: Box<dyn SurfaceWriter>,
        received: Instant,
        note: AccessNote,
    ) -> Result<HttpResponse, ApiError> {
        self.gateway.answer(entered, writer, received, note).await
    }

    /// Turns the outcome of a request into its response. Errors have the shape of the API.
    pub fn finish(
        surface: Surface,
        received: Instant,
        outcome: Result<HttpResponse, ApiError>,
    ) -> HttpResponse {
        finish(surface, received, outcome)
    }

    /// The responses that clients may continue.
    pub fn stored(&self) -> &Arc<ResponseStore> {
        &self.gateway.stored
    }

    /// Carries out a chat as the listener of clients does: its head names the caller.
    pub async fn chat(self, request: HttpRequest, payload: web::Payload) -> HttpResponse {
        let gateway = web::Data::from(self.gateway);
        generate(gateway, Surface::Chat, request, payload).await
    }

    /// Counts a request that was refused before it could be carried out.
    pub fn count_refused(&self, tenant: &str, error: &ApiError) {
        self.gateway.count_refused(tenant, error);
    }

    /// The number of requests of trainers that are held back, here or by their listener.
    pub fn held_requests(&self) -> &IntGauge {
        &self.gateway.metrics.families.trainer_held
    }

    /// The accounts.
    pub fn accounts(&self) -> &Arc<Accounts> {
        &self.gateway.accounts
    }

    /// The models that a tenant may use.
    pub fn models(&self, tenant: &str) -> ModelList {
        self.gateway.models.list(tenant, |_| true)
    }

    /// Longest text of a model, tokens.
    ///
    /// # Errors
    /// `NotFound` for a model that is not for this tenant.
    pub fn max_context(&self, tenant: &str, model: &str) -> Result<u32, ApiError> {
        let models = &self.gateway.models;
        Ok(models.max_context(&*models.get(tenant, model)?))
    }

    /// The weights of a model, as far as they are known.
    pub fn weights(&self, model: &str) -> Arc<KnownWeights> {
        self.gateway.models.weights(model)
    }

    /// Learns which models are served now. It asks the scheduler itself only now and then.
    pub fn learn_served(&self, served: Vec<ServedModel>) {
        self.gateway.models.update(served);
    }

    /// Begins a pause of the workers, unless there is one. The time of requests stands still meanwhile.
    pub fn begin_pause(&self) {
        self.gateway.relay.time.begin_pause();
    }

    /// Ends the pause of the workers, if there is one.
    pub fn end_pause(&self) {
        self.gateway.relay.time.end_pause();
    }

    /// Whether it can serve requests.
    pub fn readiness(&self) -> &Readiness {
        &self.gateway.readiness
    }

    /// Tells when it takes nothing new any more.
    pub fn drain(&self) -> &Drain {
        &self.drain
    }
}
