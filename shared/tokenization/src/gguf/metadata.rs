//! The metadata at the beginning of a GGUF file: keys with numbers, texts, or lists of them.
//!
//! The tensors come after it and are not read. A length in the file is never trusted: it is compared with the bytes
//! that are left, and memory is taken as bytes arrive.

use std::io::{Read, Take};

use serde_json::{Map, Value};

/// Largest metadata, bytes. The largest vocabularies with their merges have some twenty megabytes.
const METADATA_BYTES_MAX: u64 = 128 << 20;

/// Maximum number of items of all lists. Large vocabularies have some two million.
const ITEMS_MAX: u64 = 8_000_000;

/// The types of values that are not numbers.
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// The metadata of a file.
#[derive(Debug)]
pub(super) struct Metadata(Map<String, Value>);

impl Metadata {
    /// Reads the metadata of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// The file is damaged, has too large metadata, or has another format or version.
    pub(super) fn read(from: impl Read, file_bytes: u64) -> Result<Self, String> {
        let mut reader = Reader {
            from: from.take(file_bytes.min(METADATA_BYTES_MAX)),
            items_left: ITEMS_MAX,
        };
        if &reader.bytes::<4>()? != b"GGUF" {
            return Err("it does not begin with GGUF, so it is no GGUF file".into());
        }
        let version = u32::from_le_bytes(reader.bytes()?);
        if !matches!(version, 2 | 3) {
            let reason = format!("it has version {version} of the format, or big-endian numbers");
            return Err(reason + "; use a little-endian file of version 2 or 3");
        }
        let _tensors: [u8; 8] = reader.bytes()?;
        let mut values = Map::new();
        for _ in 0..reader.length()? {
            let key = reader.text()?;
            let kind = u32::from_le_bytes(reader.bytes()?);
            let value = reader.value(kind);
            let value = value.map_err(|reason| format!("{key}: {reason}"))?;
            if let Some(_first) = values.insert(key, value) {
                return Err("it has a key twice".into());
            }
        }
        Ok(Metadata(values))
    }

    /// A count, an id, or a boolean as 0 or 1.
    pub(super) fn count(&self, key: &str) -> Option<u32> {
        self.0.get(key)?.as_u64()?.try_into().ok()
    }

    /// A text.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.as_str()
    }

    /// A list whose items `read` can read.
    pub(super) fn list<'a, T>(
        &'a self,
        key: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.0.get(key)?.as_array()?.iter().map(read).collect()
    }
}

/// Reads values, up to the largest size of metadata.
struct Reader<R> {
    from: Take<R>,
    items_left: u64,
}

impl<R: Read> Reader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(damaged)?;
        Ok(bytes)
    }

    /// The number of bytes or items that follow. Each item has at least one byte.
    fn length(&mut self) -> Result<u64, String> {
        let length = u64::from_le_bytes(self.bytes()?);
        let left = self.from.limit();
        match length <= left {
            true => Ok(length),
            false => Err(damaged(format!("a length of {length} is above {left}"))),
        }
    }

    /// A text. Bytes that are no UTF-8 become U+FFFD.
    fn text(&mut self) -> Result<String, String> {
        let length = self.length()?;
        let mut bytes = Vec::new();
        let read = self.from.by_ref().take(length).read_to_end(&mut bytes);
        match read.map_err(damaged)? as u64 == length {
            true => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            false => Err(damaged("a text is shorter than its length")),
        }
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            // A boolean is read as a number.
            0 | 7 => u8::from_le_bytes(self.bytes()?).into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => u32::from_le_bytes(self.bytes()?).into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            6 => f32::from_le_bytes(self.bytes()?).into(),
            10 => u64::from_le_bytes(self.bytes()?).into(),
            11 => i64::from_le_bytes(self.bytes()?).into(),
            12 => f64::from_le_bytes(self.bytes()?).into(),
            TEXT => self.text()?.into(),
            LIST => match u32::from_le_bytes(self.bytes()?) {
                // The writers of the format make none either.
                LIST => return Err("a list of lists is not supported".into()),
                kind => {
                    let length = self.length()?;
                    let left = self.items_left.checked_sub(length);
                    self.items_left = left.ok_or_else(|| damaged("its lists are too long"))?;
                    let items = (0..length).map(|_| self.value(kind));
                    Value::Array(items.collect::<Result<_, _>>()?)
                }
            },
            _ => return Err(damaged(format!("the type {kind} is unknown"))),
        })
    }
}

fn damaged(reason: impl std::fmt::Display) -> String {
    format!(
        "its metadata is damaged, cut off, or larger than {METADATA_BYTES_MAX} bytes ({reason}); fetch the file again"
    )
}
