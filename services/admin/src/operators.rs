//! The guard of the admin API, which knows operators by their tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::body::MessageBody;
use actix_web::dev::{Payload, Service, ServiceRequest, ServiceResponse, Transform};
use actix_web::http::Method;
use actix_web::http::header::AUTHORIZATION;
use actix_web::middleware::{Next, from_fn};
use actix_web::{Error, FromRequest, HttpMessage as _, HttpRequest, ResponseError as _};
use parking_lot::Mutex;
use prometheus::IntCounter;
use refrain_accounts::OperatorConfig;
use refrain_accounts::tenants::key::digest;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::HttpError;
use subtle::ConstantTimeEq;

/// Shortest time between two lines of the log about calls without a right token.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Calls without a right token since the last line about them.
#[derive(Default)]
struct UnloggedCalls {
    line_at: Option<Instant>,
    count: u64,
}

impl UnloggedCalls {
    /// Counts a call. Returns the number of calls for a line, if one is due.
    fn add(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        let last = self.line_at;
        if last.is_some_and(|last| now.saturating_duration_since(last) < LINE_INTERVAL) {
            return None;
        }
        self.line_at = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

/// All operators. It has only the hashes of their tokens.
pub(crate) struct Operators {
    hashed: Vec<(Operator, [u8; 32])>,
    unlogged: Mutex<UnloggedCalls>,
    refusals: IntCounter,
}

impl Operators {
    /// The operators of a checked configuration.
    pub(crate) fn new(operators: &[OperatorConfig], refusals: IntCounter) -> Self {
        let hashed = |config: &OperatorConfig| {
            let operator = Operator {
                name: config.name.clone(),
                is_read_only: config.read_only,
            };
            Some((operator, config.digest()?))
        };
        Operators {
            hashed: operators.iter().filter_map(hashed).collect(),
            unlogged: Mutex::default(),
            refusals,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.hashed.is_empty()
    }

    /// Counts a call without a right token. Whoever calls without end does not fill the log.
    fn refused(&self, request: &ServiceRequest) {
        self.refusals.inc();
        let due = self.unlogged.lock().add(Instant::now());
        if let Some(calls) = due {
            tracing::warn!(
                peer = ?request.peer_addr(),
                calls,
                "the admin API was called without the token of an operator"
            );
        }
    }

    /// The operator of an `Authorization` header. All are compared, so the time does not tell which one matched.
    fn of(&self, authorization: Option<&str>) -> Result<&Operator, ApiError> {
        let token = authorization
            .and_then(|text| text.trim().split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| digest(token.trim()));
        let mut found = None;
        for (operator, hash) in &self.hashed {
            if token.is_some_and(|token| token.ct_eq(hash).into()) {
                found = Some(operator);
            }
        }
        found.ok_or_else(|| {
            let message = "the operator's token is missing or unknown; send it as `Authorization: Bearer <token>`. \
                           An API key of a tenant is no such token";
            ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_operator_token")
        })
    }
}

/// The operator who calls. Only the guard makes one, so a handler that takes it is behind the guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operator {
    pub(super) name: String,
    /// May look, and change nothing.
    pub(super) is_read_only: bool,
}

impl Operator {
    /// Checks that the operator may make a call with this method.
    fn check(&self, method: &Method) -> Result<(), ApiError> {
        if !self.is_read_only || method.is_safe() {
            return Ok(());
        }
        let message = format!(
            "the operator {} may look and change nothing (read_only)",
            self.name
        );
        Err(ApiError::new(ErrorKind::Forbidden, message).with_code("operator_read_only"))
    }
}

impl FromRequest for Operator {
    type Error = HttpError;
    type Future = std::future::Ready<Result<Self, HttpError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let operator = request.extensions().get::<Operator>().cloned();
        let missing = || ApiError::internal("a route of operators has no guard").into();
        std::future::ready(operator.ok_or_else(missing))
    }
}

/// Creates a middleware that passes calls of operators and answers all others with 401, before it reads a body.
pub(super) fn operators_only<S, B>(
    operators: Arc<Operators>,
) -> impl Transform<
    S,
    ServiceRequest,
    Response = ServiceResponse<impl MessageBody>,
    Error = Error,
    InitError = (),
>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    from_fn(move |request: ServiceRequest, next: Next<B>| {
        let operators = operators.clone();
        async move {
            let header = request.headers().get(AUTHORIZATION);
            let header = header.and_then(|value| value.to_str().ok());
            let operator = operators
                .of(header)
                .inspect_err(|_| operators.refused(&request));
            let operator = operator.and_then(|operator| {
                operator.check(request.method())?;
                Ok(operator.clone())
            });
            match operator {
                Ok(operator) => {
                    request.extensions_mut().insert(operator);
                    let response = next.call(request).await?;
                    Ok(response.map_into_left_body())
                }
                Err(error) => {
                    // This is a response and not an error, so that the listener counts it like any other.
                    let response = HttpError(error).error_response().map_into_right_body();
                    Ok(request.into_response(response))
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_accounts::{OperatorToken, operator_faults};

    #[test]
    fn an_operator_is_known_by_the_token_alone() {
        let (ann, ben) = (
            OperatorToken::random().unwrap(),
            OperatorToken::random().unwrap(),
        );
        let config = |name: &str, token: &OperatorToken| OperatorConfig {
            name: name.into(),
            token_sha256: token.sha256.clone(),
            read_only: false,
        };
        let configs = [config("ann", &ann), config("ben", &ben)];
        assert_eq!(operator_faults(&configs), Vec::<String>::new());
        let refusals = IntCounter::new("refusals", "test").unwrap();
        let operators = Operators::new(&configs, refusals);
        let of = |header: String| operators.of(Some(&header)).map(|found| found.name.clone());
        assert_eq!(of(format!("Bearer {}", ann.token)).unwrap(), "ann");
        assert_eq!(of(format!("bearer  {} ", ben.token)).unwrap(), "ben");
        for wrong in [
            format!("Bearer {}", ann.sha256),
            format!("Bearer {}x", ann.token),
            format!("Basic {}", ann.token),
            ann.token,
            String::new(),
        ] {
            assert_eq!(of(wrong).unwrap_err().kind, ErrorKind::Unauthorized);
        }
        assert!(operators.of(None).is_err());
    }

    #[test]
    fn many_calls_without_a_token_are_few_lines_that_count_them() {
        let (mut calls, start) = (UnloggedCalls::default(), Instant::now());
        let lines: Vec<u64> = (0..1_000)
            .filter_map(|number| calls.add(start + Duration::from_millis(25) * number))
            .collect();
        assert_eq!(lines, [1, 400, 400]);
    }
}
