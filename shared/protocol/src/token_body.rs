//! Bodies of calls that carry many token ids: the request as JSON in one line, and behind it the ids, four bytes
//! each, little-endian.
//!
//! A context of a hundred thousand tokens would cost several milliseconds as JSON on both ends. All else of a
//! request is small, and JSON lets fields be added. A service also takes a request that is JSON as a whole, with its
//! tokens in it, which is what older callers send.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::chunk::ChunkRequest;
use crate::engine::StepRequest;
use crate::{ApiError, ErrorKind, TokenId};

/// Bytes of a token id, and of a count of them.
const ID_BYTES: usize = size_of::<TokenId>();

/// A request whose token ids travel behind its JSON.
pub trait TokenBody: Serialize + DeserializeOwned {
    /// The content type of such a body.
    const CONTENT_TYPE: &'static str;
    /// The name of the request in errors, with its article.
    const NAME: &'static str;

    /// The lists that travel behind the JSON, which has them as empty ones. Their number follows from the JSON.
    fn token_lists(&mut self) -> Vec<&mut Vec<TokenId>>;
}

impl TokenBody for ChunkRequest {
    const CONTENT_TYPE: &'static str = "application/x-refrain-chunk";
    const NAME: &'static str = "a request for a chunk";

    fn token_lists(&mut self) -> Vec<&mut Vec<TokenId>> {
        vec![&mut self.tokens]
    }
}

impl TokenBody for StepRequest {
    const CONTENT_TYPE: &'static str = "application/x-refrain-step";
    const NAME: &'static str = "a step";

    fn token_lists(&mut self) -> Vec<&mut Vec<TokenId>> {
        let mut lists = Vec::new();
        for item in &mut self.items {
            lists.push(&mut item.tokens);
            lists.extend(item.open.as_mut().map(|open| &mut open.ahead));
        }
        lists
    }
}

/// Writes the body of a call. A count, written like an id, precedes each list of tokens but the last one, which has
/// the rest of the body.
///
/// # Errors
/// A field cannot be written as JSON, which would be a fault of this service.
pub fn encode_token_body<T: TokenBody>(mut request: T) -> Result<Vec<u8>, ApiError> {
    let lists = request.token_lists();
    let lists = Vec::from_iter(lists.into_iter().map(std::mem::take));
    // A JSON text without indentation has no line feed.
    let mut body = serde_json::to_vec(&request).map_err(ApiError::internal)?;
    let words = lists.iter().map(|list| 1 + list.len()).sum::<usize>();
    body.reserve_exact(1 + words * ID_BYTES);
    body.push(b'\n');
    for (index, list) in lists.iter().enumerate() {
        if index + 1 < lists.len() {
            let count = TokenId::try_from(list.len()).map_err(ApiError::internal)?;
            body.extend(count.to_le_bytes());
        }
        body.extend(list.iter().flat_map(|token| token.to_le_bytes()));
    }
    Ok(body)
}

/// Reads the body of a call.
///
/// # Errors
/// `InvalidRequest` if it is not such a body.
pub fn decode_token_body<T: TokenBody>(body: &[u8]) -> Result<T, ApiError> {
    let malformed = |detail: String| {
        let message = format!(
            "the body is not {}; check that all services run the same version",
            T::NAME
        );
        ApiError::new(ErrorKind::InvalidRequest, message).with_detail(detail)
    };
    let mut json = serde_json::Deserializer::from_slice(body).into_iter::<T>();
    let mut request = match json.next() {
        Some(Ok(request)) => request,
        // The error's own text may quote the body.
        Some(Err(error)) => {
            let place = format!("line {}, column {}", error.line(), error.column());
            return Err(malformed(place));
        }
        None => return Err(malformed("it is empty".into())),
    };
    let ids = match body.split_at(json.byte_offset()).1 {
        [b'\n', ids @ ..] => ids,
        [] => &[],
        [..] => return Err(malformed("something else follows the JSON".into())),
    };
    let (mut ids, rest) = ids.as_chunks::<ID_BYTES>();
    if !rest.is_empty() {
        return Err(malformed(format!(
            "{} bytes follow the last token id",
            rest.len()
        )));
    }
    if ids.is_empty() {
        return Ok(request);
    }
    let mut lists = request.token_lists();
    let last = lists.len().saturating_sub(1);
    for (index, list) in lists.iter_mut().enumerate() {
        let mut own = ids;
        if index < last {
            let Some((count, rest)) = ids.split_first() else {
                return Err(malformed(format!(
                    "{} lists of tokens are missing",
                    last - index
                )));
            };
            let count = TokenId::from_le_bytes(*count) as usize;
            (own, ids) = rest
                .split_at_checked(count)
                .ok_or_else(|| malformed(format!("a list of {count} tokens is cut off")))?;
        }
        if !list.is_empty() && !own.is_empty() {
            return Err(malformed("the token ids come twice".into()));
        }
        if !own.is_empty() {
            **list = own.iter().map(|id| TokenId::from_le_bytes(*id)).collect();
        }
    }
    if lists.is_empty() {
        return Err(malformed("there are token ids, and no list of them".into()));
    }
    Ok(request)
}
