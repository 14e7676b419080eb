//! bincode on the wire between workers and the store.
//!
//! Fixed-width little-endian integers (`legacy`), so that the dead bincode can be replaced by another
//! implementation of the same bytes; a size limit, so that a lying length allocates nothing; trailing bytes
//! refused. HTTP gives the framing and TCP the integrity here; on disk there is an envelope with a checksum.

use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::MeshClient;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Content type of bincode bodies.
pub const BINCODE_CONTENT_TYPE: &str = "application/x-bincode";

/// Largest decoded message.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<MESSAGE_BYTES_MAX>()
}

/// Sends a message and waits for the one that answers it.
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
/// `TooLarge` past the message limit.
pub fn encode_bincode<T: Serialize>(message: &T) -> Result<Vec<u8>, ApiError> {
    bincode::serde::encode_to_vec(message, config()).map_err(|error| {
        ApiError::new(ErrorKind::TooLarge, "message cannot be encoded").with_detail(error)
    })
}

/// Decodes a message and nothing but a message.
///
/// # Errors
/// `InvalidRequest` for bytes that are no such message, or that go on after it.
pub fn decode_bincode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let malformed = |detail: String| {
        ApiError::new(
            ErrorKind::InvalidRequest,
            "body is not a message of this call",
        )
        .with_detail(detail)
    };
    let (message, used) = bincode::serde::decode_from_slice(bytes, config())
        .map_err(|error| malformed(error.to_string()))?;
    if used != bytes.len() {
        return Err(malformed(format!(
            "{} bytes after the message",
            bytes.len() - used
        )));
    }
    Ok(message)
}
