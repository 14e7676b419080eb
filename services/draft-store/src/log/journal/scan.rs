//! Reading a journal from front to back, past damage.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{
    Batch, FLAG_FIRST, FLAG_LAST, FLAG_REMOVE, HEADER_BYTES, KEY_BYTES_MAX, LogError, MAGIC,
    NAME_KEY, VALUE_BYTES_MAX, VERSION, checksum, path_in, refused,
};

/// Bytes that are read at once.
const WINDOW_BYTES: usize = 256 << 10;
/// Damaged ranges that are told apart; later ones lengthen the last.
const RANGES_MAX: usize = 1_024;
/// So many zeros in a row are a part that never reached the disk. What is written is compressed.
const ZEROS_UNWRITTEN: usize = 256;
/// The same at the end of a write.
const ZEROS_UNWRITTEN_AT_END: usize = 8;

/// A batch as it was read.
pub(crate) struct Scanned {
    pub(crate) end: u64,
    /// The writes of it that are sound, in the order of their keys.
    pub(crate) batch: Batch,
}

/// What a scan found.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The journal's name, unless the record that tells it is damaged.
    pub(crate) name: Option<u64>,
    /// Where the last batch ends. Behind it is at most a write that was cut off.
    pub(crate) end: u64,
    /// Bytes that are no sound record and were one: in them something is lost.
    pub(crate) damage: Vec<Range<u64>>,
}

impl Scan {
    /// Where the last damage ends.
    pub(crate) fn damage_end(&self) -> Option<u64> {
        self.damage.last().map(|range| range.end)
    }

    fn note(&mut self, range: Range<u64>) {
        if self.damage.len() >= RANGES_MAX
            && let Some(last) = self.damage.last_mut()
        {
            last.end = range.end;
        } else {
            self.damage.push(range);
        }
    }
}

/// Reads the journal of a log from the beginning of a batch on. `visit` gets each batch: whole, or those of its
/// writes that are sound.
///
/// # Errors
/// The disk refuses, the journal is of a version that this program does not read, or `visit` says so.
pub(crate) fn scan(
    log: &Path,
    from: u64,
    visit: &mut dyn FnMut(Scanned) -> Result<(), LogError>,
) -> Result<Scan, LogError> {
    let path = path_in(log);
    let failed = |error: std::io::Error| refused("read", &path, &error);
    let mut window = Window::open(&path).map_err(failed)?;
    let mut found = Scan {
        end: from,
        ..Scan::default()
    };
    let mut under_way: Option<UnderWay> = None;
    let (mut at, mut records) = (from, 0u64);
    while at < window.len {
        let Some(record) = window.record(at).map_err(failed)? else {
            match window.next_record(at + 1).map_err(failed)? {
                Some(next) => {
                    found.note(at..next);
                    at = next;
                    continue;
                }
                None => break,
            }
        };
        records += 1;
        let next = at + record.bytes;
        if record.key == NAME_KEY {
            found.name = record
                .value
                .and_then(|value| Some(u64::from_le_bytes(value.try_into().ok()?)));
            found.end = next;
            at = next;
            continue;
        }
        if record.is_first
            && let Some(broken) = under_way.take()
        {
            // Its end is in the damage that lies between.
            found.end = at;
            visit(broken.ended(at))?;
        }
        let current = under_way.get_or_insert_with(|| UnderWay {
            end: record.is_first.then(|| at + record.batch_bytes),
            batch: Batch::default(),
        });
        match record.value {
            Some(value) => current.batch.put(record.key, value),
            None => current.batch.remove(record.key),
        }
        at = next;
        if record.is_last
            && let Some(whole) = under_way.take()
        {
            found.end = at;
            visit(whole.ended(at))?;
        }
    }
    if records == 0 {
        window.check_version(&path)?;
    }
    end(&mut window, &mut found, under_way, at, visit).map_err(|error| match error {
        EndError::Read(error) => failed(error),
        EndError::Visit(error) => error,
    })?;
    Ok(found)
}

/// A batch whose last record was not read yet.
struct UnderWay {
    /// Where it ends, unless the record that tells it is damaged.
    end: Option<u64>,
    batch: Batch,
}

impl UnderWay {
    fn ended(self, end: u64) -> Scanned {
        Scanned {
            end,
            batch: self.batch,
        }
    }
}

enum EndError {
    Read(std::io::Error),
    Visit(LogError),
}

impl From<std::io::Error> for EndError {
    fn from(error: std::io::Error) -> Self {
        EndError::Read(error)
    }
}

/// Decides about the bytes from `at` on, where no sound record begins: a write that was cut off is left out, damage
/// is noted, and the sound part of a damaged batch is visited.
fn end(
    window: &mut Window,
    found: &mut Scan,
    under_way: Option<UnderWay>,
    at: u64,
    visit: &mut dyn FnMut(Scanned) -> Result<(), LogError>,
) -> Result<(), EndError> {
    let len = window.len;
    let batch_end = match &under_way {
        Some(UnderWay { end: Some(end), .. }) => Some(*end),
        // The record that tells is damaged, so this batch was complete enough to be damaged.
        Some(UnderWay { end: None, .. }) => None,
        None if at >= len => return Ok(()),
        // A header that cannot be read, or that is not there as a whole.
        None => match window.header(at)? {
            Some(header) if header.batch_bytes > 0 => Some(at + header.batch_bytes),
            _ if len - at < HEADER_BYTES as u64 => return Ok(()),
            _ => None,
        },
    };
    if batch_end.is_some_and(|end| end > len) || window.has_unwritten(at..len)? {
        return Ok(());
    }
    found.note(at..len);
    found.end = len;
    if let Some(broken) = under_way {
        visit(broken.ended(len)).map_err(EndError::Visit)?;
    }
    Ok(())
}

struct Record {
    /// All of it, header included.
    bytes: u64,
    is_first: bool,
    is_last: bool,
    /// Of the first record: bytes of the whole batch.
    batch_bytes: u64,
    key: Vec<u8>,
    /// `None`: the key is removed.
    value: Option<Vec<u8>>,
}

/// A header that may be one; only the checksum tells.
struct Header {
    flags: u8,
    key_bytes: usize,
    value_bytes: usize,
    batch_bytes: u64,
}

/// Part of the file, in memory.
struct Window {
    file: File,
    len: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok(Window {
            file,
            len,
            start: 0,
            bytes: Vec::new(),
        })
    }

    /// `count` bytes from `at` on, if the file has them.
    fn get(&mut self, at: u64, count: usize) -> std::io::Result<Option<&[u8]>> {
        if at.saturating_add(count as u64) > self.len {
            return Ok(None);
        }
        let is_in = at >= self.start && at + count as u64 <= self.start + self.bytes.len() as u64;
        if !is_in {
            let wanted = (self.len - at).min(count.max(WINDOW_BYTES) as u64) as usize;
            self.bytes.resize(wanted, 0);
            self.start = at;
            if let Err(error) = self.file.read_exact_at(&mut self.bytes, at) {
                self.bytes.clear();
                return Err(error);
            }
        }
        let from = (at - self.start) as usize;
        Ok(self.bytes.get(from..from + count))
    }

    fn header(&mut self, at: u64) -> std::io::Result<Option<Header>> {
        Ok(self.get(at, HEADER_BYTES)?.and_then(|bytes| {
            let number = |range: Range<usize>| {
                bytes[range]
                    .iter()
                    .rev()
                    .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
            };
            let header = Header {
                flags: bytes[4],
                key_bytes: number(6..8) as usize,
                value_bytes: number(8..12) as usize,
                batch_bytes: number(12..16),
            };
            let is_sane = bytes[..3] == MAGIC
                && bytes[3] == VERSION
                && header.key_bytes <= KEY_BYTES_MAX
                && header.value_bytes <= VALUE_BYTES_MAX;
            is_sane.then_some(header)
        }))
    }

    /// The record at `at`, if a sound one begins there.
    fn record(&mut self, at: u64) -> std::io::Result<Option<Record>> {
        let Some(Header {
            flags,
            key_bytes,
            value_bytes,
            batch_bytes,
        }) = self.header(at)?
        else {
            return Ok(None);
        };
        let bytes = HEADER_BYTES + key_bytes + value_bytes;
        let Some(all) = self.get(at, bytes)? else {
            return Ok(None);
        };
        let (header, content) = all.split_at(HEADER_BYTES);
        let (key, value) = content.split_at(key_bytes);
        let (head, sum) = header.split_at(HEADER_BYTES - 8);
        if sum != checksum(at, head, key, value).to_le_bytes() {
            return Ok(None);
        }
        Ok(Some(Record {
            bytes: bytes as u64,
            is_first: flags & FLAG_FIRST != 0,
            is_last: flags & FLAG_LAST != 0,
            batch_bytes,
            key: key.to_vec(),
            value: (flags & FLAG_REMOVE == 0).then(|| value.to_vec()),
        }))
    }

    /// Where the next sound record begins.
    fn next_record(&mut self, from: u64) -> std::io::Result<Option<u64>> {
        let mut at = from;
        while at + HEADER_BYTES as u64 <= self.len {
            let count = (self.len - at).min(4_096) as usize;
            let candidates: Vec<u64> = match self.get(at, count)? {
                Some(bytes) => bytes
                    .windows(MAGIC.len())
                    .enumerate()
                    .filter(|(_, bytes)| *bytes == MAGIC)
                    .map(|(offset, _)| at + offset as u64)
                    .collect(),
                None => return Ok(None),
            };
            for candidate in candidates {
                if self.record(candidate)?.is_some() {
                    return Ok(Some(candidate));
                }
            }
            // A magic number may lie across the seam.
            at += (count - (MAGIC.len() - 1)).max(1) as u64;
        }
        Ok(None)
    }

    /// Whether bytes are missing that a completed write would have filled.
    fn has_unwritten(&mut self, range: Range<u64>) -> std::io::Result<bool> {
        let (mut at, mut zeros) = (range.start, 0);
        while at < range.end {
            let count = (range.end - at).min(4_096) as usize;
            let Some(bytes) = self.get(at, count)? else {
                return Ok(true);
            };
            for byte in bytes {
                zeros = if *byte == 0 { zeros + 1 } else { 0 };
                if zeros >= ZEROS_UNWRITTEN {
                    return Ok(true);
                }
            }
            at += count as u64;
        }
        Ok(zeros >= ZEROS_UNWRITTEN_AT_END)
    }

    /// Refuses a journal of another version, in which no record is sound for that reason.
    fn check_version(&mut self, path: &Path) -> Result<(), LogError> {
        let head = self
            .get(0, MAGIC.len() + 1)
            .map_err(|error| refused("read", path, &error))?;
        match head {
            Some([magic @ .., version]) if *magic == MAGIC && *version != VERSION => {
                Err(LogError::Refused(format!(
                    "{} is of version {version}, and this program reads version {VERSION}; nothing was changed. \
                     Start the program that wrote it",
                    path.display()
                )))
            }
            _ => Ok(()),
        }
    }
}
