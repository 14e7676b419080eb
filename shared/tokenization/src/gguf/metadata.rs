//! The metadata at the beginning of a GGUF file: keys with numbers, texts, or lists of them.
//!
//! The tensors come after it and are not read. A length in the file is never trusted: it is compared with the bytes
//! that are left, and memory is taken as bytes arrive.

use std::collections::HashMap;
use std::io::{Read, Take};

/// Largest metadata, bytes. The largest vocabularies with their merges have some twenty megabytes.
const METADATA_BYTES_MAX: u64 = 128 << 20;

/// Fewest bytes of a key with its value: the length of the key, the type of the value, and one byte.
const ENTRY_BYTES_MIN: u64 = 13;

/// Fewest bytes of a text, which are those of its length.
const TEXT_BYTES_MIN: u64 = 8;

/// Numbers of the types of values in the format, where there is more than one way to read them.
const FLOAT_32: u32 = 6;
const FLOAT_64: u32 = 12;
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// The metadata of a file.
#[derive(Debug)]
pub(super) struct Metadata {
    values: HashMap<String, Value>,
}

/// A value. Booleans are integers.
#[derive(Debug)]
enum Value {
    Integer(i64),
    Float,
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f64>),
    Texts(Vec<String>),
}

impl Metadata {
    /// Reads the metadata of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// The file is damaged, has too large metadata, or has another format or version.
    pub(super) fn read(from: impl Read, file_bytes: u64) -> Result<Self, String> {
        let mut reader = Reader(from.take(file_bytes.min(METADATA_BYTES_MAX)));
        if &reader.bytes::<4>()? != b"GGUF" {
            return Err("it does not begin with GGUF, so it is no GGUF file".into());
        }
        let version = u32::from_le_bytes(reader.bytes()?);
        if matches!(version.swap_bytes(), 1..=3) {
            return Err(
                "it was written for machines with big-endian numbers; use a little-endian file"
                    .into(),
            );
        }
        if !matches!(version, 2 | 3) {
            return Err(format!(
                "it has version {version} of the format; use a file of version 2 or 3"
            ));
        }
        let _tensors: [u8; 8] = reader.bytes()?;
        let mut values = HashMap::new();
        for _ in 0..reader.length(ENTRY_BYTES_MIN)? {
            let key = reader.text()?;
            let kind = u32::from_le_bytes(reader.bytes()?);
            let value = reader
                .value(kind)
                .map_err(|reason| format!("{key}: {reason}"))?;
            if values.contains_key(&key) {
                return Err(format!("it has the key {key} twice"));
            }
            values.insert(key, value);
        }
        Ok(Metadata { values })
    }

    /// An integer or a boolean.
    pub(super) fn integer(&self, key: &str) -> Option<i64> {
        match self.values.get(key)? {
            Value::Integer(value) => Some(*value),
            _ => None,
        }
    }

    /// An integer that fits a count or an id.
    pub(super) fn count(&self, key: &str) -> Option<u32> {
        self.integer(key)?.try_into().ok()
    }

    /// A text.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            Value::Text(value) => Some(value),
            _ => None,
        }
    }

    /// A list of integers.
    pub(super) fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.values.get(key)? {
            Value::Integers(values) => Some(values),
            _ => None,
        }
    }

    /// A list of floating-point numbers.
    pub(super) fn floats(&self, key: &str) -> Option<&[f64]> {
        match self.values.get(key)? {
            Value::Floats(values) => Some(values),
            _ => None,
        }
    }

    /// A list of texts.
    pub(super) fn texts(&self, key: &str) -> Option<&[String]> {
        match self.values.get(key)? {
            Value::Texts(values) => Some(values),
            _ => None,
        }
    }
}

/// Reads values, up to the largest size of metadata.
struct Reader<R>(Take<R>);

impl<R: Read> Reader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).map_err(cut_off)?;
        Ok(bytes)
    }

    /// The number of items that follow, each of which has at least `item_bytes_min` bytes.
    fn length(&mut self, item_bytes_min: u64) -> Result<u64, String> {
        let length = u64::from_le_bytes(self.bytes()?);
        match length <= self.0.limit() / item_bytes_min {
            true => Ok(length),
            false => Err(cut_off(format!(
                "a length of {length} is more than there is"
            ))),
        }
    }

    /// A text. Bytes that are no UTF-8 become U+FFFD.
    fn text(&mut self) -> Result<String, String> {
        let length = self.length(1)?;
        let mut bytes = Vec::new();
        let read = self.0.by_ref().take(length).read_to_end(&mut bytes);
        if read.map_err(cut_off)? as u64 != length {
            return Err(cut_off("a text is shorter than its length"));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            FLOAT_32 | FLOAT_64 => {
                self.float(kind)?;
                Value::Float
            }
            TEXT => Value::Text(self.text()?),
            LIST => match u32::from_le_bytes(self.bytes()?) {
                TEXT => {
                    let length = self.length(TEXT_BYTES_MIN)?;
                    Value::Texts((0..length).map(|_| self.text()).collect::<Result<_, _>>()?)
                }
                // The writers of the format make no lists of lists either.
                LIST => return Err("a list of lists is not supported".into()),
                kind @ (FLOAT_32 | FLOAT_64) => {
                    let length = self.length(1)?;
                    Value::Floats(
                        (0..length)
                            .map(|_| self.float(kind))
                            .collect::<Result<_, _>>()?,
                    )
                }
                kind => {
                    let length = self.length(1)?;
                    Value::Integers(
                        (0..length)
                            .map(|_| self.integer(kind))
                            .collect::<Result<_, _>>()?,
                    )
                }
            },
            kind => Value::Integer(self.integer(kind)?),
        })
    }

    fn float(&mut self, kind: u32) -> Result<f64, String> {
        Ok(match kind {
            FLOAT_32 => f32::from_le_bytes(self.bytes()?).into(),
            _ => f64::from_le_bytes(self.bytes()?),
        })
    }

    /// An integer of one of the types of the format. The largest ones become the largest here.
    fn integer(&mut self, kind: u32) -> Result<i64, String> {
        Ok(match kind {
            0 | 7 => u8::from_le_bytes(self.bytes()?).into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => u32::from_le_bytes(self.bytes()?).into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            10 => u64::from_le_bytes(self.bytes()?)
                .try_into()
                .unwrap_or(i64::MAX),
            11 => i64::from_le_bytes(self.bytes()?),
            _ => return Err(format!("the type {kind} of its value is unknown")),
        })
    }
}

fn cut_off(reason: impl std::fmt::Display) -> String {
    format!(
        "its metadata is damaged, cut off, or larger than {METADATA_BYTES_MAX} bytes ({reason}); fetch the file again"
    )
}
