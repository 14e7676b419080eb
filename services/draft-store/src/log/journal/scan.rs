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
/// A disk writes so many bytes at once or not at all.
const SECTOR_BYTES: u64 = 512;
/// The system reads so many bytes at once.
const PAGE_BYTES: usize = 4_096;
/// Pages that may be unreadable; more are no damage, but a disk that is away.
const UNREADABLE_PAGES_MAX: u32 = 256;
/// Stands for a byte that could not be read.
const UNREADABLE: u8 = 0xee;
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
    /// Where something of it is lost: between which of its keys. Keys of a batch ascend.
    pub(crate) gaps: Vec<Gap>,
}

/// Writes are lost between two keys; `None` stands for the beginning and the end of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) after: Option<Vec<u8>>,
    pub(crate) before: Option<Vec<u8>>,
}

impl Gap {
    /// Whether the write of a key that begins with `prefix` may be lost here.
    pub(crate) fn may_hide(&self, prefix: &[u8]) -> bool {
        let is_after = |after: &Vec<u8>| prefix > &after[..] || after.starts_with(prefix);
        let is_before = |before: &Vec<u8>| prefix < &before[..];
        self.after.as_ref().is_none_or(is_after) && self.before.as_ref().is_none_or(is_before)
    }
}

/// The findings of a scan.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// The journal's name, unless the record that tells it is damaged.
    pub(crate) name: Option<u64>,
    /// Where the last batch ends. Behind it is at most a write that was cut off.
    pub(crate) end: u64,
    /// Byte ranges where a record once stood that can no longer be read.
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
/// writes that are sound, with its gaps.
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
    // A batch that ended with gaps. Whether it was ever written as a whole shows once it is known to be the last.
    let mut doubted: Option<UnderWay> = None;
    let (mut at, mut records) = (from, 0u64);
    let mut gap: Option<Range<u64>> = None;
    while at < window.len {
        let Some(record) = window.record(at).map_err(failed)? else {
            match window.next_record(at + 1).map_err(failed)? {
                Some(next) => {
                    gap = Some(at..next);
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
        let is_of_next = under_way
            .as_ref()
            .is_some_and(|current| record.is_first || !current.precedes(&record.key));
        if is_of_next && let Some(mut broken) = under_way.take() {
            // Its end is in the damage that lies between.
            broken.lost(gap.take(), None);
            broken.until = at;
            settle(&mut found, &mut doubted, Some(broken), visit)?;
        }
        let begins = under_way.is_none();
        let current = under_way.get_or_insert_with(|| UnderWay {
            start: gap
                .as_ref()
                .filter(|_| !record.is_first)
                .map_or(at, |gap| gap.start),
            end: record.is_first.then(|| at + record.batch_bytes),
            until: next,
            batch: Batch::default(),
            last_key: None,
            gaps: Vec::new(),
            damage: Vec::new(),
        });
        if begins && record.is_first {
            // Damage between two batches belongs to neither.
            if let Some(range) = gap.take() {
                settle(&mut found, &mut doubted, None, visit)?;
                found.note(range);
            }
        } else if gap.is_some() || begins {
            current.lost(gap.take(), Some(&record.key));
        }
        current.last_key = Some(record.key.clone());
        current.until = next;
        match record.value {
            Some(value) => current.batch.put(record.key, value),
            None => current.batch.remove(record.key),
        }
        at = next;
        if record.is_last {
            settle(&mut found, &mut doubted, under_way.take(), visit)?;
        }
    }
    if records == 0 {
        window.check_version(&path)?;
    }
    let ended = Ended {
        under_way,
        doubted,
        at,
        gap,
    };
    end(&mut window, &mut found, ended, visit).map_err(|error| match error {
        EndError::Read(error) => failed(error),
        EndError::Visit(error) => error,
    })?;
    Ok(found)
}

/// A batch that is being read.
struct UnderWay {
    start: u64,
    /// Where it ends, unless the record that tells it is damaged.
    end: Option<u64>,
    /// Where what was read of it ends.
    until: u64,
    batch: Batch,
    last_key: Option<Vec<u8>>,
    gaps: Vec<Gap>,
    damage: Vec<Range<u64>>,
}

impl UnderWay {
    fn precedes(&self, key: &[u8]) -> bool {
        self.last_key.as_ref().is_none_or(|last| &last[..] < key)
    }

    fn lost(&mut self, damage: Option<Range<u64>>, before: Option<&Vec<u8>>) {
        self.gaps.push(Gap {
            after: self.last_key.clone(),
            before: before.cloned(),
        });
        self.damage.extend(damage);
    }
}

/// Visits a batch that is through. One with gaps waits until another one follows.
fn settle(
    found: &mut Scan,
    doubted: &mut Option<UnderWay>,
    batch: Option<UnderWay>,
    visit: &mut dyn FnMut(Scanned) -> Result<(), LogError>,
) -> Result<(), LogError> {
    let through = match batch {
        Some(batch) if !batch.gaps.is_empty() => doubted.replace(batch),
        Some(batch) => {
            settle(found, doubted, None, visit)?;
            Some(batch)
        }
        None => doubted.take(),
    };
    let Some(batch) = through else {
        return Ok(());
    };
    for range in batch.damage {
        found.note(range);
    }
    found.end = found.end.max(batch.until);
    visit(Scanned {
        end: batch.until,
        batch: batch.batch,
        gaps: batch.gaps,
    })
}

/// The state of a scan when no sound record follows.
struct Ended {
    under_way: Option<UnderWay>,
    doubted: Option<UnderWay>,
    at: u64,
    gap: Option<Range<u64>>,
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

impl From<LogError> for EndError {
    fn from(error: LogError) -> Self {
        EndError::Visit(error)
    }
}

/// Decides about the last batch, and about the bytes where no sound record begins. A write that was cut off, at its end
/// or in its midst, was never acknowledged: it is left out whole. Anything else is damage, and its sound part is
/// visited.
fn end(
    window: &mut Window,
    found: &mut Scan,
    ended: Ended,
    visit: &mut dyn FnMut(Scanned) -> Result<(), LogError>,
) -> Result<(), EndError> {
    let Ended {
        under_way,
        mut doubted,
        at,
        gap,
    } = ended;
    let len = window.len;
    let batch_end = match &under_way {
        Some(current) => current.end,
        None if at >= len => None,
        // A header that cannot be read, or that is not there as a whole.
        None => match window.header(at)? {
            Some(header) if header.is_consistent() => Some(at + header.batch_bytes),
            _ => None,
        },
    };
    let has_rest = at < len;
    let is_cut_off = has_rest && len - at < HEADER_BYTES as u64
        || batch_end.is_some_and(|end| end > len)
        || has_rest && window.has_unwritten(at..len)?;
    if let Some(mut last) = under_way {
        let mut has_holes = is_cut_off;
        for range in &last.damage {
            has_holes |= window.has_hole(range.clone())?;
        }
        settle(found, &mut doubted, None, visit)?;
        if has_holes {
            found.end = last.start;
            return Ok(());
        }
        last.lost(gap.or(has_rest.then_some(at..len)), None);
        last.until = len;
        settle(found, &mut doubted, Some(last), visit)?;
        return Ok(settle(found, &mut doubted, None, visit)?);
    }
    // The batch before is the last one, unless something of another stands behind it.
    let is_last = !has_rest || is_cut_off;
    if is_last && let Some(last) = &doubted {
        let mut has_holes = false;
        for range in &last.damage {
            has_holes |= window.has_hole(range.clone())?;
        }
        if has_holes {
            found.end = last.start;
            return Ok(());
        }
    }
    settle(found, &mut doubted, None, visit)?;
    if has_rest && !is_cut_off {
        found.note(at..len);
        found.end = len;
    }
    Ok(())
}

struct Record {
    /// All of it, header included.
    bytes: u64,
    is_first: bool,
    is_last: bool,
    /// In the first record of a batch: bytes of the whole batch.
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

impl Header {
    /// Whether the length of the batch agrees with that of its only record.
    fn is_consistent(&self) -> bool {
        let record = (HEADER_BYTES + self.key_bytes + self.value_bytes) as u64;
        let is_alone = self.flags & FLAG_FIRST != 0 && self.flags & FLAG_LAST != 0;
        self.batch_bytes >= record && (!is_alone || self.batch_bytes == record)
    }
}

/// Part of the file, in memory.
struct Window {
    file: File,
    /// Pages that the disk could not read.
    unreadable: u32,
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
            unreadable: 0,
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
            if self.file.read_exact_at(&mut self.bytes, at).is_err() {
                self.read_pages(at)?;
            }
        }
        let from = (at - self.start) as usize;
        Ok(self.bytes.get(from..from + count))
    }

    /// Reads the window once more, page by page. A page that the disk cannot read is damaged like any other.
    fn read_pages(&mut self, at: u64) -> std::io::Result<()> {
        let mut done = 0;
        while done < self.bytes.len() {
            let end = self.bytes.len().min(done + PAGE_BYTES);
            let page = &mut self.bytes[done..end];
            if let Err(error) = self.file.read_exact_at(page, at + done as u64) {
                self.unreadable += 1;
                if self.unreadable > UNREADABLE_PAGES_MAX {
                    // Rather a disk that is away.
                    self.bytes.clear();
                    return Err(error);
                }
                page.fill(UNREADABLE);
            }
            done = end;
        }
        Ok(())
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

    /// Whether a part of a write never reached the disk: a sector, as far as it is in the range, is all zeros.
    fn has_hole(&mut self, range: Range<u64>) -> std::io::Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / SECTOR_BYTES + 1) * SECTOR_BYTES);
            let count = (end - at) as usize;
            let part = self.get(at, count)?.unwrap_or_default();
            if count >= ZEROS_UNWRITTEN_AT_END && part.iter().all(|byte| *byte == 0) {
                return Ok(true);
            }
            at = end;
        }
        Ok(false)
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
