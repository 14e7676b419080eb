//! Acceptance statistics as bytes, for the wire and the disk: versioned and checksummed.
//!
//! Magic (2), version (1), zero (1), number of cells (2), observations (8), the cells in order, xxh3 of all that (8).
//! A cell is its number and two numbers of 16 bits. For a weight of stage one they are its value in steps of 1/2048,
//! and the sum of its squared moves in steps of 1/16; for a head, decayed counts in steps of 1/128; for stage two,
//! decayed failures in steps of 1/64. Cells of which next to nothing is known are left out, so some hundred cells are
//! usual and [`STATISTICS_BYTES_MAX`] is the limit.
//!
//! The weights of tokens are left out as well: they would tell of the texts that they were learnt from. Damaged bytes
//! and bytes of another version are an error and nothing worse: statistics are learnt again.

use xxhash_rust::xxh3::xxh3_64;

use super::features::KINDS;
use super::head::{Cell, HEAD_CELLS};
use super::model::{PLAIN_WEIGHTS, Weight};
use super::{AcceptanceStatistics, Failures, RATIOS};

const MAGIC: [u8; 2] = *b"Rc";
/// Changes whenever a cell comes to mean something else.
const VERSION: u8 = 5;
/// The bytes before the number of cells.
const COUNT_AT: usize = 4;
const HEADER_BYTES: usize = 14;
const CELL_BYTES: usize = 6;
const CHECKSUM_BYTES: usize = 8;
const WEIGHT_UNIT: f32 = 2048.0;
const MOVED_UNIT: f32 = 16.0;
/// Decayed counts stay below twice the half-life of 256, so they fit.
const HEAD_UNIT: f32 = 128.0;
/// Units of stage two, whose half-life is 512.
const DRAFT_UNIT: f32 = 64.0;
/// Numbers of the cells of a head; before them stand the weights, and after them stage two.
const HEAD_FROM: usize = PLAIN_WEIGHTS;
const DRAFTS_FROM: usize = HEAD_FROM + HEAD_CELLS;
const ALL_CELLS: usize = DRAFTS_FROM + KINDS * RATIOS;
/// The most bytes that statistics take.
pub const STATISTICS_BYTES_MAX: usize = HEADER_BYTES + CELL_BYTES * ALL_CELLS + CHECKSUM_BYTES;

/// The reason why bytes are no acceptance statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatisticsError {
    /// The length is too short, or not the one that the header says.
    #[error("acceptance statistics: the length is wrong")]
    Length,
    /// The magic differs.
    #[error("these bytes are no acceptance statistics")]
    Magic,
    /// Another version of this format wrote them.
    #[error("acceptance statistics: version {0} cannot be read, only version {VERSION}")]
    Version(u8),
    /// The checksum differs.
    #[error("acceptance statistics: the checksum differs")]
    Checksum,
    /// Cells are out of order or unknown, or more nodes were accepted than seen.
    #[error("acceptance statistics: the cells make no sense")]
    Content,
}

impl AcceptanceStatistics {
    /// The statistics as bytes, without the weights of tokens.
    pub fn to_bytes(&self) -> Vec<u8> {
        let units = |sum: f32, unit: f32| (sum * unit).round() as u16;
        let weights = self.nodes.plain_weights().iter().map(|of| {
            let weight = (of.weight * WEIGHT_UNIT).round() as i16;
            [weight as u16, units(of.moved, MOVED_UNIT)]
        });
        let head = self.head.cells.iter().map(|cell| {
            let seen = units(cell.seen, HEAD_UNIT);
            // Rounding alone could make more accepted than seen.
            [seen, units(cell.accepted, HEAD_UNIT).min(seen)]
        });
        let drafts = self.drafts.iter().enumerate().flat_map(|(kind, table)| {
            let numbers = DRAFTS_FROM + kind * RATIOS..;
            numbers.zip(table).map(|(at, failures)| {
                let expected = units(failures.expected, DRAFT_UNIT);
                (at, [expected, units(failures.observed, DRAFT_UNIT)])
            })
        });
        let cells = (0..).zip(weights).chain((HEAD_FROM..).zip(head));
        let mut bytes = Vec::with_capacity(1024);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, 0, 0, 0]);
        bytes.extend(self.observations.to_le_bytes());
        let mut count = 0u16;
        for (at, values) in cells.chain(drafts).filter(|(_, values)| is_kept(*values)) {
            bytes.extend((at as u16).to_le_bytes());
            bytes.extend(values.into_iter().flat_map(u16::to_le_bytes));
            count += 1;
        }
        bytes[COUNT_AT..COUNT_AT + 2].copy_from_slice(&count.to_le_bytes());
        let sum = xxh3_64(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// See [`StatisticsError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StatisticsError> {
        let (observations, cells) = checked_cells(bytes)?;
        let mut statistics = AcceptanceStatistics {
            observations,
            ..AcceptanceStatistics::default()
        };
        let mut from = 0;
        for cell in cells {
            let number = |at: usize| u16::from_le_bytes([cell[at], cell[at + 1]]);
            let (at, first, second) = (usize::from(number(0)), number(2), number(4));
            if at < from || at >= ALL_CELLS || !is_kept([first, second]) {
                return Err(StatisticsError::Content);
            }
            from = at + 1;
            if let Some(at) = at.checked_sub(DRAFTS_FROM) {
                let table = &mut statistics.drafts[at / RATIOS];
                table.resize(RATIOS, Failures::default());
                table[at % RATIOS] = Failures {
                    expected: f32::from(first) / DRAFT_UNIT,
                    observed: f32::from(second) / DRAFT_UNIT,
                };
            } else if let Some(at) = at.checked_sub(HEAD_FROM) {
                if second > first {
                    return Err(StatisticsError::Content);
                }
                let cells = &mut statistics.head.cells;
                cells.resize(HEAD_CELLS, Cell::default());
                cells[at] = Cell {
                    seen: f32::from(first) / HEAD_UNIT,
                    accepted: f32::from(second) / HEAD_UNIT,
                };
            } else {
                let weight = Weight {
                    weight: f32::from(first as i16) / WEIGHT_UNIT,
                    moved: f32::from(second) / MOVED_UNIT,
                };
                statistics.nodes.set_plain_weight(at, weight);
            }
        }
        Ok(statistics)
    }
}

/// Whether a cell says anything.
fn is_kept(values: [u16; 2]) -> bool {
    values != [0, 0]
}

/// The observations and the bytes of the cells, once header, length and checksum are found right.
fn checked_cells(bytes: &[u8]) -> Result<(u64, &[[u8; CELL_BYTES]]), StatisticsError> {
    let (body, sum) = bytes
        .split_last_chunk::<CHECKSUM_BYTES>()
        .ok_or(StatisticsError::Length)?;
    let [magic @ .., version, _] = body
        .first_chunk::<COUNT_AT>()
        .ok_or(StatisticsError::Length)?;
    if magic[..] != MAGIC {
        return Err(StatisticsError::Magic);
    }
    if xxh3_64(body).to_le_bytes() != *sum {
        return Err(StatisticsError::Checksum);
    }
    if *version != VERSION {
        return Err(StatisticsError::Version(*version));
    }
    let (header, cells) = body
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or(StatisticsError::Length)?;
    let [_, _, _, _, low, high, observations @ ..] = *header;
    let count = usize::from(u16::from_le_bytes([low, high]));
    let (cells, rest) = cells.as_chunks::<CELL_BYTES>();
    if cells.len() != count || !rest.is_empty() {
        return Err(StatisticsError::Length);
    }
    Ok((u64::from_le_bytes(observations), cells))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::candidate::{Scope, Source};
    use crate::statistics::features::NodeFeatures;
    use crate::testing::drafted_once;

    fn node(source: Source, match_len: u32, depth: u32, share: f32) -> NodeFeatures {
        NodeFeatures {
            source,
            scope: Scope::Tenant,
            match_len,
            depth,
            count: 3,
            share,
            witnesses: None,
            after: None,
            token: None,
        }
    }

    /// Some thousand observations of all kinds.
    fn learnt() -> AcceptanceStatistics {
        let mut statistics = AcceptanceStatistics::default();
        for at in 0..4000u32 {
            let source = [Source::Suffix, Source::Prediction][at as usize % 2];
            let node = node(source, at % 40, 1 + at % 9, (at % 11) as f32 / 10.0);
            statistics.observe_node(&node, at % 5 < 3);
            statistics.observe_head(at, 3, at % 4);
        }
        let draft = drafted_once(Scope::Tenant, 4, &[(5, None), (6, Some(0)), (7, Some(1))]);
        for at in 0..100 {
            statistics.observe(&draft, &[5, 6, 7 + at % 2]);
        }
        statistics
    }

    #[test]
    fn estimates_survive_as_bytes() {
        let statistics = learnt();
        let bytes = statistics.to_bytes();
        assert!(bytes.len() <= STATISTICS_BYTES_MAX);
        let read = AcceptanceStatistics::from_bytes(&bytes).unwrap();
        for match_len in [1, 7, 30] {
            for depth in 1..10 {
                for source in [Source::Suffix, Source::Prediction] {
                    let node = node(source, match_len, depth, 0.5);
                    let is = read.node_probability(&node);
                    let was = statistics.node_probability(&node);
                    assert!((is - was).abs() < 2e-3, "{node:?}: {is} for {was}");
                }
            }
        }
        let heads = |of: &AcceptanceStatistics| -> Vec<f32> {
            let at = |tokens| of.head_path_probabilities(tokens, 4);
            at(100).chain(at(3000)).collect()
        };
        for (is, was) in heads(&read).iter().zip(heads(&statistics)) {
            assert!((is - was).abs() < 2e-3, "{is} for {was}");
        }
        assert_eq!(read.observations(), statistics.observations());
        for (is, was) in read.drafts.iter().zip(&statistics.drafts) {
            for (is, was) in is.iter().zip(was) {
                assert!(
                    (is.ratio() - was.ratio()).abs() < 2e-3,
                    "{is:?} for {was:?}"
                );
            }
        }
        let empty = AcceptanceStatistics::default();
        assert_eq!(
            AcceptanceStatistics::from_bytes(&empty.to_bytes()),
            Ok(empty)
        );
    }

    /// They would tell of the texts that they were learnt from.
    #[test]
    fn weights_of_tokens_do_not_leave_the_process() {
        let draft = |token| drafted_once(Scope::Tenant, 4, &[(token, None)]);
        let mut statistics = AcceptanceStatistics::default();
        for _ in 0..100 {
            statistics.observe(&draft(5), &[5]);
            statistics.observe(&draft(6), &[9]);
        }
        let probability =
            |of: &AcceptanceStatistics, token| of.path_probabilities(&draft(token))[0];
        assert!(probability(&statistics, 5) > probability(&statistics, 6) + 0.5);
        let read = AcceptanceStatistics::from_bytes(&statistics.to_bytes()).unwrap();
        assert_eq!(probability(&read, 5), probability(&read, 6));
    }

    #[test]
    fn full_tables_are_within_the_limit() {
        let mut full = AcceptanceStatistics {
            observations: u64::MAX,
            ..AcceptanceStatistics::default()
        };
        for at in 0..PLAIN_WEIGHTS {
            let weight = Weight {
                weight: if at % 2 == 0 { -9.5 } else { 15.0 },
                moved: 4_095.0,
            };
            full.nodes.set_plain_weight(at, weight);
        }
        let cell = Cell {
            seen: 370.0,
            accepted: 369.0,
        };
        full.head.cells.resize(HEAD_CELLS, cell);
        for table in &mut full.drafts {
            let failures = Failures {
                expected: 700.0,
                observed: 738.0,
            };
            table.resize(RATIOS, failures);
        }
        let bytes = full.to_bytes();
        assert_eq!(bytes.len(), STATISTICS_BYTES_MAX);
        assert_eq!(AcceptanceStatistics::from_bytes(&bytes), Ok(full));
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let bytes = learnt().to_bytes();
        let refusal = |bytes: &[u8]| AcceptanceStatistics::from_bytes(bytes).unwrap_err();
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            let expected = match at {
                0 | 1 => StatisticsError::Magic,
                _ => StatisticsError::Checksum,
            };
            assert_eq!(refusal(&damaged), expected, "{at}");
        }
        assert_eq!(refusal(&bytes[..7]), StatisticsError::Length);
        for other in [2, VERSION - 1, VERSION + 1] {
            let refused = refusal(&of_cells(other, &[]));
            assert_eq!(refused, StatisticsError::Version(other));
        }
    }

    fn of_cells(version: u8, cells: &[(u16, u16, u16)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([version, 0]);
        bytes.extend((cells.len() as u16).to_le_bytes());
        bytes.extend(7u64.to_le_bytes());
        for (at, first, second) in cells {
            bytes.extend(
                [*at, *first, *second]
                    .into_iter()
                    .flat_map(u16::to_le_bytes),
            );
        }
        let sum = xxh3_64(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    proptest! {
        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = AcceptanceStatistics::from_bytes(&bytes);
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            with_magic.extend(xxh3_64(&with_magic).to_le_bytes());
            if let Ok(read) = AcceptanceStatistics::from_bytes(&with_magic) {
                prop_assert_eq!(read.to_bytes(), with_magic);
            }
        }

        /// Also where length and checksum are right.
        #[test]
        fn no_cells_bring_it_down(
            mut cells in prop::collection::vec((0..ALL_CELLS as u16 + 9, 0u16..9, 0u16..9), 0..40),
            in_order in any::<bool>(),
        ) {
            if in_order {
                cells.sort_unstable();
                cells.dedup_by_key(|(at, ..)| *at);
            }
            let makes_sense = {
                let mut from = 0;
                cells.iter().all(|&(at, first, second)| {
                    let at = usize::from(at);
                    let is_next = at >= from && at < ALL_CELLS;
                    from = at + 1;
                    let is_head = (HEAD_FROM..DRAFTS_FROM).contains(&at);
                    is_next && (first, second) != (0, 0) && (second <= first || !is_head)
                })
            };
            let read = AcceptanceStatistics::from_bytes(&of_cells(VERSION, &cells)).map(|_| ());
            prop_assert_eq!(read, makes_sense.then_some(()).ok_or(StatisticsError::Content));
        }
    }
}
