//! Passes requests to the server and answers back, as they are, and keeps a copy of both.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Instant;

use actix_web::http::StatusCode;
use actix_web::http::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, TRANSFER_ENCODING,
};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use futures_util::stream::{BoxStream, unfold};
use futures_util::{Stream, StreamExt as _};
use parking_lot::Mutex;
use refrain_gateway::session_of_heads;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::{millis, unix_ms};
use refrain_service_kit::http::{
    HttpError, failed_call_kind, pass_answer_heads, pass_request_heads,
};
use tokio::sync::mpsc;

use super::copy::BodyCopy;
use super::exchange::Exchange;
use super::writer::RecordWriter;

/// Pieces of a request's body that wait for the server.
const BODY_PIECES_MAX: usize = 16;

/// The server, and where its calls are written to.
pub(super) struct Proxy {
    /// Scheme, host and port of the server.
    origin: String,
    http: reqwest::Client,
    writer: RecordWriter,
    /// Keys of callers are told apart by their hash, which differs in each run.
    key_hash: RandomState,
}

impl Proxy {
    /// A proxy in front of the server at `origin`.
    ///
    /// # Errors
    /// There are no roots to trust.
    pub(super) fn new(origin: String, writer: RecordWriter) -> anyhow::Result<Self> {
        // Neither followed elsewhere nor decompressed: that is the client's business.
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
        Ok(Proxy {
            origin,
            http: http.build()?,
            writer,
            key_hash: RandomState::new(),
        })
    }

    /// Sends a request on, and answers with the server's answer.
    pub(super) async fn pass(
        proxy: web::Data<Proxy>,
        request: HttpRequest,
        payload: web::Payload,
    ) -> Result<HttpResponse, HttpError> {
        let (created_ms, begun) = (unix_ms(), Instant::now());
        let heads = request.headers();
        let head = |name: &HeaderName| heads.get(name).and_then(|value| value.to_str().ok());
        let copy = BodyCopy::new(head(&CONTENT_ENCODING).unwrap_or_default(), "");
        let copy = Arc::new(Mutex::new(copy));
        let mut call = proxy.call(&request)?;
        if head(&CONTENT_LENGTH).is_some() || head(&TRANSFER_ENCODING).is_some() {
            call = call.body(reqwest::Body::wrap_stream(copied(payload, copy.clone())));
        }
        let answer = call.send().await.map_err(|error| unreachable(&error))?;
        let key = head(&AUTHORIZATION).or_else(|| heads.get("x-api-key")?.to_str().ok());
        let exchange = Exchange {
            path: request.path().to_owned(),
            created_ms,
            duration_ms: 0,
            first_ms: None,
            session: session_of_heads(heads),
            caller: key.map(|key| proxy.key_hash.hash_one(key)),
            request: copy,
            status: answer.status().as_u16(),
            answer: copy_of(&answer),
        };
        Ok(proxy.into_inner().answer(answer, exchange, begun)?)
    }

    /// The request to the server, without its body.
    fn call(&self, request: &HttpRequest) -> Result<reqwest::RequestBuilder, ApiError> {
        let method = reqwest::Method::from_bytes(request.method().as_str().as_bytes());
        let path = request.uri().path_and_query();
        let path = path.map_or("/", |path| path.as_str());
        let url = format!("{}{path}", self.origin);
        let call = self.http.request(method.map_err(ApiError::internal)?, url);
        let call = pass_request_heads(request.headers(), call, |_| false);
        // The body goes on as it is, so it is as long.
        Ok(match request.headers().get(CONTENT_LENGTH) {
            Some(bytes) => call.header(CONTENT_LENGTH.as_str(), bytes.as_bytes()),
            None => call,
        })
    }

    /// The server's answer, which is written down when it has ended.
    fn answer(
        self: Arc<Self>,
        answer: reqwest::Response,
        exchange: Exchange,
        begun: Instant,
    ) -> Result<HttpResponse, ApiError> {
        let status = StatusCode::from_u16(exchange.status).map_err(ApiError::internal)?;
        let mut response = HttpResponse::build(status);
        pass_answer_heads(answer.headers(), &mut response, |_| false);
        if let Some(bytes) = answer.content_length() {
            response.no_chunking(bytes);
        }
        let passed = PassedAnswer {
            proxy: self,
            pieces: answer.bytes_stream().boxed(),
            exchange: Some(exchange),
            begun,
        };
        Ok(response.streaming(passed.into_stream()))
    }
}

/// An answer on its way to the client.
struct PassedAnswer {
    proxy: Arc<Proxy>,
    pieces: BoxStream<'static, reqwest::Result<Bytes>>,
    /// `None` once it was written down.
    exchange: Option<Exchange>,
    begun: Instant,
}

impl PassedAnswer {
    fn into_stream(self) -> impl Stream<Item = Result<Bytes, HttpError>> {
        unfold(self, |mut answer| async move {
            let time_ms = |begun: Instant| millis(begun.elapsed());
            match answer.pieces.next().await {
                Some(Ok(piece)) => {
                    if let Some(exchange) = &mut answer.exchange {
                        exchange.answer.add(&piece);
                        exchange
                            .first_ms
                            .get_or_insert_with(|| time_ms(answer.begun));
                    }
                    Some((Ok(piece), answer))
                }
                None => {
                    if let Some(mut exchange) = answer.exchange.take() {
                        exchange.duration_ms = time_ms(answer.begun);
                        answer.proxy.writer.write(exchange);
                    }
                    None
                }
                Some(Err(error)) => Some((Err(unreachable(&error).into()), answer)),
            }
        })
    }
}

impl Drop for PassedAnswer {
    fn drop(&mut self) {
        if self.exchange.is_some() {
            self.proxy.writer.leave_out("an answer that broke off");
        }
    }
}

/// An empty copy of the answer's body.
fn copy_of(answer: &reqwest::Response) -> BodyCopy {
    let head = |name: &str| answer.headers().get(name)?.to_str().ok();
    BodyCopy::new(
        head("content-encoding").unwrap_or_default(),
        head(CONTENT_TYPE.as_str()).unwrap_or_default(),
    )
}

/// The pieces of a request's body, copied on their way. The body belongs to the thread of its connection, and the
/// client that sends it on to none, so the pieces go through a queue.
fn copied(
    mut payload: web::Payload,
    copy: Arc<Mutex<BodyCopy>>,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(BODY_PIECES_MAX);
    actix_web::rt::spawn(async move {
        while let Some(piece) = payload.next().await {
            if let Ok(piece) = &piece {
                copy.lock().add(piece);
            }
            let piece = piece.map_err(std::io::Error::other);
            if sender.send(piece).await.is_err() {
                return;
            }
        }
    });
    unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((piece, receiver))
    })
}

fn unreachable(error: &reqwest::Error) -> ApiError {
    let message = match failed_call_kind(error) {
        ErrorKind::Unavailable => "the server of --to cannot be reached",
        _ => "the server of --to did not answer, or broke its answer off",
    };
    ApiError::new(ErrorKind::Upstream, message).with_detail(error)
}
