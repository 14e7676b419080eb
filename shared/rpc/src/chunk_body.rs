//! The body of a call for a chunk: the request as JSON in one line, and behind it the token ids of its text, four
//! bytes each, little-endian.
//!
//! A context of a hundred thousand tokens would cost several milliseconds as JSON on both ends. All else of a request
//! is small, and JSON lets fields be added. A worker also takes a request that is JSON as a whole, with its tokens in
//! it, which is what older gateways send.

use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::{ApiError, ErrorKind, TokenId};

/// The content type of such bodies.
pub const CHUNK_CONTENT_TYPE: &str = "application/x-refrain-chunk";

/// Bytes of a token id.
const ID_BYTES: usize = size_of::<TokenId>();

/// Writes the body of a call.
///
/// # Errors
/// A field cannot be written as JSON, which would be a fault of this service.
pub fn encode_chunk(mut request: ChunkRequest) -> Result<Vec<u8>, ApiError> {
    let tokens = std::mem::take(&mut request.tokens);
    // A JSON text without indentation has no line feed.
    let mut body = serde_json::to_vec(&request).map_err(ApiError::internal)?;
    body.reserve_exact(1 + tokens.len() * ID_BYTES);
    body.push(b'\n');
    body.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    Ok(body)
}

/// Reads the body of a call.
///
/// # Errors
/// `InvalidRequest` if it is not such a body.
pub fn decode_chunk(body: &[u8]) -> Result<ChunkRequest, ApiError> {
    let malformed = |detail: String| {
        ApiError::new(
            ErrorKind::InvalidRequest,
            "the body is not a request for a chunk; check that all services run the same version",
        )
        .with_detail(detail)
    };
    let end = body.iter().position(|byte| *byte == b'\n');
    let (fields, ids) = match end {
        Some(end) => (&body[..end], &body[end + 1..]),
        None => (body, &[][..]),
    };
    let mut request: ChunkRequest = serde_json::from_slice(fields).map_err(|error| {
        // The error's own text may quote the body.
        malformed(format!("line {}, column {}", error.line(), error.column()))
    })?;
    let (ids, rest) = ids.as_chunks::<ID_BYTES>();
    if !rest.is_empty() {
        return Err(malformed(format!(
            "{} bytes follow the last token id",
            rest.len()
        )));
    }
    if !ids.is_empty() {
        if !request.tokens.is_empty() {
            return Err(malformed("the token ids come twice".into()));
        }
        request.tokens = ids.iter().map(|id| TokenId::from_le_bytes(*id)).collect();
    }
    Ok(request)
}
