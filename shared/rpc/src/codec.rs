//! bincode on the wire between workers and the draft store.
//!
//! Integers are little-endian with fixed width (`legacy`), so that another implementation can replace bincode, whose
//! authors have stopped its development. A size limit makes sure that a false length allocates nothing. Trailing
//! bytes are refused. HTTP frames the messages and TCP checks them; on disk there is an envelope with a checksum.

use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The content type of bincode bodies.
pub const BINCODE_CONTENT_TYPE: &str = "application/x-bincode";

/// Largest message in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<MESSAGE_BYTES_MAX>()
}

/// Sends a message and waits for its answer.
pub(crate) async fn post<Q: Serialize, A: DeserializeOwned>(
    client: &MeshClient,
    path: &str,
    request: &Q,
    timeout: Duration,
) -> Result<A, ApiError> {
    let body = encode_bincode(request)?;
    let answer = client
        .post_bytes(path, BINCODE_CONTENT_TYPE, body, timeout)
        .await?;
    decode_bincode(&answer)
}

/// Encodes a message.
///
/// # Errors
/// `TooLarge` if the message exceeds the limit.
pub fn encode_bincode<T: Serialize>(message: &T) -> Result<Vec<u8>, ApiError> {
    bincode::serde::encode_to_vec(message, config()).map_err(|error| {
        ApiError::new(ErrorKind::TooLarge, "the message is too large to be sent").with_detail(error)
    })
}

/// Decodes the bytes of exactly one message.
///
/// # Errors
/// `InvalidRequest` if the bytes are not such a message, or continue after it.
pub fn decode_bincode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let malformed = |detail: String| {
        ApiError::new(
            ErrorKind::InvalidRequest,
            "the body is not a message of this call; check that all services run the same version",
        )
        .with_detail(detail)
    };
    let (message, used) = bincode::serde::decode_from_slice(bytes, config())
        .map_err(|error| malformed(error.to_string()))?;
    if used != bytes.len() {
        return Err(malformed(format!(
            "{} bytes follow the message",
            bytes.len() - used
        )));
    }
    Ok(message)
}
