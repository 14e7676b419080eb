//! Bodies that clients compress. Agents send whole conversations in each turn, and text shrinks to a fifth.

use std::io::{self, Read};

use actix_web::http::header::{CONTENT_ENCODING, HeaderMap};
use brotli_decompressor::Decompressor;
use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use refrain_protocol::ApiError;

/// The encodings that are read, as an error names them.
const KNOWN: &str = "gzip, deflate, br and zstd";

/// Largest window of a zstd frame, as a power of two: what RFC 9659 allows in HTTP. A frame may name more, and the
/// memory would be taken before a byte is read.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

/// Bytes that Brotli reads at once.
const BROTLI_BUFFER_BYTES: usize = 4_096;

/// The encoding of a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentEncoding {
    /// Not compressed.
    #[default]
    Identity,
    /// `gzip`, of one or several members.
    Gzip,
    /// `deflate`, with zlib's frame or without.
    Deflate,
    /// `br`.
    Brotli,
    /// `zstd`.
    Zstd,
}

impl ContentEncoding {
    /// The encoding that the heads of a request or an answer name.
    ///
    /// # Errors
    /// `InvalidRequest` for any other, and for several at once.
    pub fn of(heads: &HeaderMap) -> Result<Self, ApiError> {
        let named = heads.get(CONTENT_ENCODING);
        Self::named(named.map_or("", |named| named.to_str().unwrap_or_default()))
    }

    /// The encoding of this name; an empty one stands for none.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn named(named: &str) -> Result<Self, ApiError> {
        Ok(match named.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => ContentEncoding::Identity,
            "gzip" | "x-gzip" => ContentEncoding::Gzip,
            "deflate" => ContentEncoding::Deflate,
            "br" => ContentEncoding::Brotli,
            "zstd" => ContentEncoding::Zstd,
            _ => {
                let named: String = named.chars().take(40).collect();
                let message = format!("content-encoding: {named} is not supported; send {KNOWN}");
                let error = ApiError::invalid("content-encoding", message);
                return Err(error.with_code("unsupported_encoding"));
            }
        })
    }

    /// Reads the text of a compressed body, piece by piece. `None` if it is not compressed.
    ///
    /// # Errors
    /// The decoder cannot be made.
    pub fn reader(self, body: &[u8]) -> io::Result<Option<Box<dyn Read + '_>>> {
        Ok(Some(match self {
            ContentEncoding::Identity => return Ok(None),
            ContentEncoding::Gzip => Box::new(MultiGzDecoder::new(body)),
            // Some clients leave the two bytes out that the name stands for.
            ContentEncoding::Deflate if !is_zlib(body) => Box::new(DeflateDecoder::new(body)),
            ContentEncoding::Deflate => Box::new(ZlibDecoder::new(body)),
            ContentEncoding::Brotli => Box::new(Decompressor::new(body, BROTLI_BUFFER_BYTES)),
            ContentEncoding::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(body)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Box::new(decoder)
            }
        }))
    }
}

/// Whether a body begins as zlib's do.
fn is_zlib(body: &[u8]) -> bool {
    let [method, flags, ..] = body else {
        return true;
    };
    method & 0x0f == 8 && (u16::from(*method) << 8 | u16::from(*flags)).is_multiple_of(31)
}
