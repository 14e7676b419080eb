//! Reads a journal from front to back, past damage.

use std::ops::Range;
use std::path::Path;

use crate::log::journal::format::{HEADER_BYTES, NAME_KEY, path_in};
use crate::log::journal::record_reader::RecordReader;
use crate::log::journal::{Batch, LogError};

/// Most damaged ranges that are listed separately. Later ones extend the last.
const RANGES_MAX: usize = 1_024;

/// A batch as it was read.
pub(crate) struct ScannedBatch {
    pub(crate) end: u64,
    /// Its sound writes, in the order of their keys.
    pub(crate) batch: Batch,
    /// Where writes are lost. The keys of a batch ascend, so a gap lies between two keys.
    pub(crate) gaps: Vec<Gap>,
}

/// Lost writes between two keys. `None` stands for the beginning or the end of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) after: Option<Vec<u8>>,
    pub(crate) before: Option<Vec<u8>>,
}

impl Gap {
    /// Whether the lost writes may include a key that begins with `prefix`.
    pub(crate) fn may_hide(&self, prefix: &[u8]) -> bool {
        let is_after = |after: &Vec<u8>| prefix > &after[..] || after.starts_with(prefix);
        let is_before = |before: &Vec<u8>| prefix < &before[..];
        self.after.as_ref().is_none_or(is_after) && self.before.as_ref().is_none_or(is_before)
    }
}

/// The findings of a scan.
#[derive(Debug, Default)]
pub(crate) struct ScanReport {
    /// The journal's name, unless its record is damaged.
    pub(crate) name: Option<u64>,
    /// The end of the last batch. At most a write that was cut off follows it.
    pub(crate) end: u64,
    /// Byte ranges of records that can no longer be read.
    pub(crate) damage: Vec<Range<u64>>,
}

impl ScanReport {
    /// The end of the last damaged range.
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

/// Reads the journal of a log from the beginning of a batch on. `visit` gets each batch: complete, or its sound
/// writes with its gaps.
///
/// # Errors
/// The disk refuses, the journal has a version that this program does not read, or `visit` fails.
pub(crate) fn scan(
    log: &Path,
    from: u64,
    visit: &mut dyn FnMut(ScannedBatch) -> Result<(), LogError>,
) -> Result<ScanReport, LogError> {
    let mut window = RecordReader::open(&path_in(log))?;
    let mut scan = Scan {
        found: ScanReport {
            end: from,
            ..ScanReport::default()
        },
        doubted: None,
        visit,
    };
    let mut under_way: Option<PartialBatch> = None;
    let (mut at, mut records) = (from, 0u64);
    let mut gap: Option<Range<u64>> = None;
    while at < window.len {
        let Some(record) = window.record(at)? else {
            match window.next_record(at + 1)? {
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
            scan.found.name = record
                .value
                .and_then(|value| Some(u64::from_le_bytes(value.try_into().ok()?)));
            scan.found.end = next;
            at = next;
            continue;
        }
        let is_of_next = under_way
            .as_ref()
            .is_some_and(|current| record.is_first || !current.precedes(&record.key));
        if is_of_next && let Some(mut broken) = under_way.take() {
            // Its end is in the damage before this record.
            broken.add_gap(gap.take(), None);
            broken.until = at;
            scan.settle(Some(broken))?;
        }
        let begins = under_way.is_none();
        let current = under_way.get_or_insert_with(|| PartialBatch {
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
                scan.settle(None)?;
                scan.found.note(range);
            }
        } else if gap.is_some() || begins {
            current.add_gap(gap.take(), Some(&record.key));
        }
        current.last_key = Some(record.key.clone());
        current.until = next;
        match record.value {
            Some(value) => current.batch.put(record.key, value),
            None => current.batch.remove(record.key),
        }
        at = next;
        if record.is_last {
            scan.settle(under_way.take())?;
        }
    }
    if records == 0 {
        window.check_version()?;
    }
    scan.end(&mut window, under_way, at, gap)?;
    Ok(scan.found)
}

/// A batch that is being read.
struct PartialBatch {
    start: u64,
    /// The end of the batch, unless the record with its length is damaged.
    end: Option<u64>,
    /// The end of what was read of it.
    until: u64,
    batch: Batch,
    last_key: Option<Vec<u8>>,
    gaps: Vec<Gap>,
    damage: Vec<Range<u64>>,
}

impl PartialBatch {
    fn precedes(&self, key: &[u8]) -> bool {
        self.last_key.as_ref().is_none_or(|last| &last[..] < key)
    }

    /// Whether part of it never reached the disk.
    fn has_hole(&self, window: &mut RecordReader) -> Result<bool, LogError> {
        for range in &self.damage {
            if window.has_hole(range.clone())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn add_gap(&mut self, damage: Option<Range<u64>>, before: Option<&Vec<u8>>) {
        self.gaps.push(Gap {
            after: self.last_key.clone(),
            before: before.cloned(),
        });
        self.damage.extend(damage);
    }
}

/// The findings of a scan so far, and the receiver of its batches.
struct Scan<'a> {
    found: ScanReport,
    /// The last batch, if it has gaps. Only when nothing follows it is it known whether it was ever written
    /// completely.
    doubted: Option<PartialBatch>,
    visit: &'a mut dyn FnMut(ScannedBatch) -> Result<(), LogError>,
}

impl Scan<'_> {
    /// Visits a finished batch. A batch with gaps waits until another one follows.
    fn settle(&mut self, batch: Option<PartialBatch>) -> Result<(), LogError> {
        let through = match batch {
            Some(batch) if !batch.gaps.is_empty() => self.doubted.replace(batch),
            Some(batch) => {
                self.settle(None)?;
                Some(batch)
            }
            None => self.doubted.take(),
        };
        let Some(batch) = through else {
            return Ok(());
        };
        for range in batch.damage {
            self.found.note(range);
        }
        self.found.end = self.found.end.max(batch.until);
        (self.visit)(ScannedBatch {
            end: batch.until,
            batch: batch.batch,
            gaps: batch.gaps,
        })
    }

    /// Decides about the last batch, and about the bytes after the last sound record, which begin at `at`.
    ///
    /// A write that was cut off, at its end or in the middle, was never acknowledged, so it is dropped completely.
    /// Anything else is damage, and its sound part is visited.
    fn end(
        &mut self,
        window: &mut RecordReader,
        under_way: Option<PartialBatch>,
        at: u64,
        gap: Option<Range<u64>>,
    ) -> Result<(), LogError> {
        let len = window.len;
        let batch_end = match &under_way {
            Some(current) => current.end,
            None if at >= len => None,
            // The header cannot be read, or is incomplete.
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
            let is_incomplete = is_cut_off || last.has_hole(window)?;
            self.settle(None)?;
            if is_incomplete {
                self.found.end = last.start;
                return Ok(());
            }
            last.add_gap(gap.or(has_rest.then_some(at..len)), None);
            last.until = len;
            self.settle(Some(last))?;
            return self.settle(None);
        }
        // The batch before is the last one, unless part of another batch follows it.
        let is_last = !has_rest || is_cut_off;
        if is_last
            && let Some(last) = &self.doubted
            && last.has_hole(window)?
        {
            self.found.end = last.start;
            return Ok(());
        }
        self.settle(None)?;
        if has_rest && !is_cut_off {
            self.found.note(at..len);
            self.found.end = len;
        }
        Ok(())
    }
}
