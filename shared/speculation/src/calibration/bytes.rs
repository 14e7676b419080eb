//! Chances as bytes, for the wire and the disk: versioned and checksummed.
//!
//! Magic (2), version (1), what it is (1), number of cells (2), the cells in order, xxh3 of all that (8). A cell is its
//! number and two numbers of 16 bits each: counts, or decayed counts in steps of 1/128. Cells of which next to nothing is
//! known are left out, so some hundred are usual and [`CALIBRATION_BYTES_MAX`] is the end. Bytes that are damaged, or of
//! another version, are an error and never more: chances are learnt again.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use super::observed::{Count, FINEST};
use super::{CELLS, Calibration, Cell, KINDS, Observed};

const MAGIC: [u8; 2] = *b"Rc";
/// Changes whenever a cell comes to mean something else.
const VERSION: u8 = 1;
const TABLES: u8 = 1;
const OBSERVED: u8 = 2;
const HEADER_BYTES: usize = 6;
const CELL_BYTES: usize = 6;
const CHECKSUM_BYTES: usize = 8;
/// Decayed counts are stored as multiples of 1 / `UNIT`: they stay below twice the half-life.
const UNIT: f32 = 128.0;
/// Most bytes that chances can take.
pub const CALIBRATION_BYTES_MAX: usize = HEADER_BYTES + CELL_BYTES * KINDS * CELLS + CHECKSUM_BYTES;

/// Why bytes are no chances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalibrationError {
    /// Shorter than any, or of another length than they say.
    Length,
    /// Something else altogether.
    Magic,
    /// Made by another version of this form.
    Version(u8),
    /// Tables where observations were awaited, or the other way round.
    Form,
    /// Damaged.
    Checksum,
    /// Cells out of order, unknown ones, or more accepted than seen.
    Content,
}

impl fmt::Display for CalibrationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CalibrationError::Length => f.write_str("chances of drafts: the length is wrong"),
            CalibrationError::Magic => f.write_str("these bytes are no chances of drafts"),
            CalibrationError::Version(version) => {
                write!(
                    f,
                    "chances of drafts: version {version}, where {VERSION} is read"
                )
            }
            CalibrationError::Form => {
                f.write_str("chances of drafts: tables and observations are not the same")
            }
            CalibrationError::Checksum => f.write_str("chances of drafts: the checksum differs"),
            CalibrationError::Content => f.write_str("chances of drafts: the cells make no sense"),
        }
    }
}

impl std::error::Error for CalibrationError {}

impl Calibration {
    /// The tables as bytes, with all that was observed, taken or not.
    pub fn to_bytes(&self) -> Vec<u8> {
        let all = self.tables.iter().enumerate().flat_map(|(kind, table)| {
            let cells = table.iter().enumerate();
            cells.map(move |(at, cell)| (kind * CELLS + at, cell))
        });
        let units = |sum: f32| (sum * UNIT).round() as u16;
        let cells = all.map(|(at, cell)| {
            let seen = units(cell.seen);
            (at, seen, units(cell.accepted).min(seen))
        });
        encode(TABLES, cells)
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// See [`CalibrationError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CalibrationError> {
        let mut calibration = Calibration::new();
        for cell in decode(bytes, TABLES, KINDS * CELLS)? {
            let (at, seen, accepted) = cell?;
            let table = &mut calibration.tables[at / CELLS];
            table.resize(CELLS, Cell::default());
            table[at % CELLS] = Cell {
                seen: f32::from(seen) / UNIT,
                accepted: f32::from(accepted) / UNIT,
            };
        }
        Ok(calibration)
    }
}

impl Observed {
    /// The counts as bytes. Those above 65,535 are scaled down to it: a cell forgets what is so long ago.
    pub fn to_bytes(&self) -> Vec<u8> {
        let cells = self.counts().map(|(at, Count { seen, accepted })| {
            let most = seen.min(u32::from(u16::MAX));
            let scaled = |count: u32| u64::from(count) * u64::from(most) / u64::from(seen);
            (at, scaled(seen) as u16, scaled(accepted) as u16)
        });
        encode(OBSERVED, cells)
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// See [`CalibrationError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CalibrationError> {
        let mut observed = Observed::default();
        for cell in decode(bytes, OBSERVED, FINEST)? {
            let (at, seen, accepted) = cell?;
            let (seen, accepted) = (u32::from(seen), u32::from(accepted));
            observed.put(at, Count { seen, accepted });
        }
        Ok(observed)
    }
}

fn encode(form: u8, cells: impl Iterator<Item = (usize, u16, u16)>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1024);
    bytes.extend(MAGIC);
    bytes.extend([VERSION, form, 0, 0]);
    let mut count = 0u16;
    for (at, seen, accepted) in cells.filter(|(_, seen, _)| *seen > 0) {
        for number in [at as u16, seen, accepted] {
            bytes.extend(number.to_le_bytes());
        }
        count += 1;
    }
    bytes[HEADER_BYTES - 2..HEADER_BYTES].copy_from_slice(&count.to_le_bytes());
    let sum = xxh3_64(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

type ReadCell = Result<(usize, u16, u16), CalibrationError>;

/// The cells, each checked: below `cells_max` and in order.
fn decode(
    bytes: &[u8],
    form: u8,
    cells_max: usize,
) -> Result<impl Iterator<Item = ReadCell>, CalibrationError> {
    let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
        return Err(CalibrationError::Length);
    };
    let Some((header, cells)) = body.split_first_chunk::<HEADER_BYTES>() else {
        return Err(CalibrationError::Length);
    };
    let [magic @ .., version, is_form, low, high] = header;
    if magic[..] != MAGIC {
        return Err(CalibrationError::Magic);
    }
    if xxh3_64(body).to_le_bytes() != *sum {
        return Err(CalibrationError::Checksum);
    }
    if *version != VERSION {
        return Err(CalibrationError::Version(*version));
    }
    if *is_form != form {
        return Err(CalibrationError::Form);
    }
    let count = usize::from(u16::from_le_bytes([*low, *high]));
    let (cells, rest) = cells.as_chunks::<CELL_BYTES>();
    if cells.len() != count || !rest.is_empty() {
        return Err(CalibrationError::Length);
    }
    let mut from = 0;
    Ok(cells.iter().map(move |cell| {
        let number = |at: usize| u16::from_le_bytes([cell[at], cell[at + 1]]);
        let (at, seen, accepted) = (usize::from(number(0)), number(2), number(4));
        if at < from || at >= cells_max || seen == 0 || accepted > seen {
            return Err(CalibrationError::Content);
        }
        from = at + 1;
        Ok((at, seen, accepted))
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{NodeFeatures, Scope, Source};

    fn node(source: Source, match_len: u32, position: u32, share: f32) -> NodeFeatures {
        NodeFeatures {
            source,
            scope: Scope::Tenant,
            match_len,
            position,
            count: 3,
            share,
        }
    }

    /// Some thousand observations of all kinds.
    fn learnt() -> Calibration {
        let mut calibration = Calibration::new();
        for at in 0..4000u32 {
            let source = [Source::Suffix, Source::Eagle3, Source::Prediction][at as usize % 3];
            let node = node(source, at % 40, 1 + at % 9, (at % 11) as f32 / 10.0);
            calibration.learn(&node, at % 5 < 3);
        }
        calibration
    }

    #[test]
    fn chances_survive_as_bytes() {
        let mut calibration = learnt();
        let bytes = calibration.to_bytes();
        assert!(bytes.len() <= CALIBRATION_BYTES_MAX);
        let read = Calibration::from_bytes(&bytes).unwrap();
        for match_len in [1, 7, 30] {
            for position in 1..10 {
                for source in [Source::Suffix, Source::Eagle3] {
                    let node = node(source, match_len, position, 0.5);
                    let (is, was) = (read.chance(&node), calibration.chance(&node));
                    assert!((is - was).abs() < 2e-3, "{node:?}: {is} for {was}");
                }
            }
        }
        let observed = calibration.take_observed();
        assert_eq!(Observed::from_bytes(&observed.to_bytes()), Ok(observed));
        // Nothing is a message, too.
        let nothing = Observed::default();
        assert_eq!(Observed::from_bytes(&nothing.to_bytes()), Ok(nothing));
    }

    /// What workers tell of texts that come again and again.
    #[test]
    fn what_was_always_accepted_survives_as_bytes() {
        for counts in [&[50, 143][..], &[1, 2, 3, 700, 5], &[65_535, 1], &[7; 60]] {
            let mut calibration = Calibration::new();
            for &count in counts {
                let mut observed = Observed::default();
                for at in (0..FINEST).step_by(97) {
                    let (seen, accepted) = (count, count);
                    observed.put(at, Count { seen, accepted });
                }
                calibration.add(&observed);
                let bytes = calibration.to_bytes();
                let read = Calibration::from_bytes(&bytes).unwrap();
                assert_eq!(read.to_bytes(), bytes);
                // As the store does: on with what was read.
                calibration = read;
            }
        }
        let all = |sum: f32| Cell {
            seen: sum,
            accepted: f32::from_bits(sum.to_bits() + 1),
        };
        for half in (0..40_000u16).step_by(19) {
            let mut calibration = Calibration::new();
            calibration.tables[0].resize(CELLS, Cell::default());
            calibration.tables[0][0] = all((f32::from(half) + 0.5) / UNIT);
            let read = Calibration::from_bytes(&calibration.to_bytes());
            assert!(read.is_ok(), "{half}");
        }
    }

    #[test]
    fn what_is_full_is_within_the_limit() {
        let mut full = Calibration::new();
        for table in &mut full.tables {
            let cell = Cell {
                seen: 370.0,
                accepted: 369.0,
            };
            table.resize(CELLS, cell);
        }
        let bytes = full.to_bytes();
        assert_eq!(bytes.len(), CALIBRATION_BYTES_MAX);
        assert_eq!(Calibration::from_bytes(&bytes), Ok(full));
        let mut observed = Observed::default();
        for at in 0..FINEST {
            let count = Count {
                seen: u32::MAX,
                accepted: u32::MAX / 2,
            };
            observed.put(at, count);
        }
        let read = Observed::from_bytes(&observed.to_bytes()).unwrap();
        let (_, count) = read.counts().next().unwrap();
        assert_eq!((count.seen, count.accepted), (65_535, 32_767));
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let bytes = learnt().take_observed().to_bytes();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(Observed::from_bytes(&damaged).is_err(), "byte {at}");
            assert!(Observed::from_bytes(&bytes[..at]).is_err(), "cut at {at}");
        }
        let as_tables = Calibration::from_bytes(&bytes);
        assert_eq!(as_tables, Err(CalibrationError::Form));
    }

    /// Bytes of some form that are whole but for what they say of cells.
    fn of_cells(version: u8, form: u8, cells: &[(u16, u16, u16)]) -> Vec<u8> {
        let mut bytes = vec![MAGIC[0], MAGIC[1], version, form];
        bytes.extend((cells.len() as u16).to_le_bytes());
        for (at, seen, accepted) in cells {
            for number in [at, seen, accepted] {
                bytes.extend(number.to_le_bytes());
            }
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// What can be read is what is written; the rest is refused.
    fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
        if let Ok(mut read) = Calibration::from_bytes(bytes) {
            prop_assert_eq!(read.to_bytes(), bytes);
            read.learn(&node(Source::Suffix, 1, 1, 0.5), true);
        }
        if let Ok(read) = Observed::from_bytes(bytes) {
            prop_assert_eq!(read.to_bytes(), bytes);
            Calibration::new().add(&read);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            check(&bytes)?;
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            with_magic.extend(xxh3_64(&with_magic).to_le_bytes());
            check(&with_magic)?;
        }

        /// Also where length and checksum are right.
        #[test]
        fn no_cells_bring_it_down(
            form in 1u8..3,
            mut cells in prop::collection::vec(
                (0..KINDS as u16 * CELLS as u16 + 9, 0u16..9, 0u16..9),
                0..40,
            ),
            in_order in any::<bool>(),
            makes_sense in any::<bool>(),
        ) {
            if in_order || makes_sense {
                cells.sort_unstable();
                cells.dedup_by_key(|(at, ..)| *at);
            }
            let end = if form == TABLES { KINDS * CELLS } else { FINEST };
            if makes_sense {
                for (_, seen, accepted) in &mut cells {
                    *seen = (*seen).max(1);
                    *accepted = (*accepted).min(*seen);
                }
                cells.retain(|(at, ..)| usize::from(*at) < end);
            }
            let bytes = of_cells(VERSION, form, &cells);
            check(&bytes)?;
            let expected = {
                let mut from = 0;
                cells.iter().all(|&(at, seen, accepted)| {
                    let at = usize::from(at);
                    let is_next = at >= from && at < end;
                    from = at + 1;
                    is_next && seen > 0 && accepted <= seen
                })
            };
            let read = match form {
                TABLES => Calibration::from_bytes(&bytes).map(|_| ()),
                _ => Observed::from_bytes(&bytes).map(|_| ()),
            };
            prop_assert_eq!(read, expected.then_some(()).ok_or(CalibrationError::Content));
            prop_assert!(expected || !makes_sense);
            let newer = of_cells(VERSION + 1, form, &cells);
            prop_assert_eq!(
                Observed::from_bytes(&newer),
                Err(CalibrationError::Version(VERSION + 1))
            );
        }
    }
}
