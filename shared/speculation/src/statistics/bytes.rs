//! Acceptance statistics as bytes, for the wire and the disk: versioned and checksummed.
//!
//! Magic (2), version (1), zero (1), number of cells (2), the cells in order, xxh3 of all that (8). A cell is its
//! number and two numbers of 16 bits: decayed counts in steps of 1/128 for stage one, decayed failures in steps of
//! 1/64 for stage two. Cells of which next to nothing is known are left out, so some hundred cells are usual and
//! [`STATISTICS_BYTES_MAX`] is the limit. Damaged bytes and bytes of another version are an error and nothing worse:
//! statistics are learnt again.

use xxhash_rust::xxh3::xxh3_64;

use super::{AcceptanceStatistics, CELLS, Cell, Failures, KINDS, RATIOS};

const MAGIC: [u8; 2] = *b"Rc";
/// Changes whenever a cell comes to mean something else.
const VERSION: u8 = 3;
const HEADER_BYTES: usize = 6;
const CELL_BYTES: usize = 6;
const CHECKSUM_BYTES: usize = 8;
/// Units of stage one. Decayed counts stay below twice the half-life of 256, so they fit.
const NODE_UNIT: f32 = 128.0;
/// Units of stage two, whose half-life is 512.
const DRAFT_UNIT: f32 = 64.0;
/// An earlier version, which had one table less at each stage.
const EARLIER_VERSION: u8 = 2;
/// Numbers of the cells of stage one; those of stage two follow.
const NODE_CELLS: usize = KINDS * CELLS;
const ALL_CELLS: usize = NODE_CELLS + KINDS * RATIOS;
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
    /// The tables as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let units = |sum: f32, unit: f32| (sum * unit).round() as u16;
        let nodes = numbered(&self.nodes, CELLS).map(|(at, cell)| {
            let seen = units(cell.seen, NODE_UNIT);
            // Rounding alone could make more accepted than seen.
            [at as u16, seen, units(cell.accepted, NODE_UNIT).min(seen)]
        });
        let drafts = numbered(&self.drafts, RATIOS).map(|(at, failures)| {
            let at = (NODE_CELLS + at) as u16;
            let expected = units(failures.expected, DRAFT_UNIT);
            [at, expected, units(failures.observed, DRAFT_UNIT)]
        });
        let mut bytes = Vec::with_capacity(1024);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, 0, 0, 0]);
        let mut count = 0u16;
        for cell in nodes.chain(drafts).filter(|cell| cell[1] > 0) {
            bytes.extend(cell.into_iter().flat_map(u16::to_le_bytes));
            count += 1;
        }
        bytes[HEADER_BYTES - 2..HEADER_BYTES].copy_from_slice(&count.to_le_bytes());
        let sum = xxh3_64(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// See [`StatisticsError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StatisticsError> {
        let mut statistics = AcceptanceStatistics::default();
        let mut from = 0;
        let (version, cells) = checked_cells(bytes)?;
        let node_cells = match version {
            EARLIER_VERSION => NODE_CELLS - CELLS,
            _ => NODE_CELLS,
        };
        for cell in cells {
            let number = |at: usize| u16::from_le_bytes([cell[at], cell[at + 1]]);
            let (mut at, first, second) = (usize::from(number(0)), number(2), number(4));
            if at >= node_cells {
                at += NODE_CELLS - node_cells;
            }
            if at < from || at >= ALL_CELLS || first == 0 {
                return Err(StatisticsError::Content);
            }
            from = at + 1;
            if let Some(at) = at.checked_sub(NODE_CELLS) {
                let table = &mut statistics.drafts[at / RATIOS];
                table.resize(RATIOS, Failures::default());
                table[at % RATIOS] = Failures {
                    expected: f32::from(first) / DRAFT_UNIT,
                    observed: f32::from(second) / DRAFT_UNIT,
                };
                continue;
            }
            if second > first {
                return Err(StatisticsError::Content);
            }
            let table = &mut statistics.nodes[at / CELLS];
            table.resize(CELLS, Cell::default());
            table[at % CELLS] = Cell {
                seen: f32::from(first) / NODE_UNIT,
                accepted: f32::from(second) / NODE_UNIT,
            };
            if at % CELLS < super::SHARES {
                statistics.observations += u64::from(first) / NODE_UNIT as u64;
            }
        }
        Ok(statistics)
    }
}

/// All cells with their numbers.
fn numbered<T>(tables: &[Vec<T>; KINDS], cells: usize) -> impl Iterator<Item = (usize, &T)> {
    tables.iter().enumerate().flat_map(move |(kind, table)| {
        let table = table.iter().enumerate();
        table.map(move |(at, cell)| (kind * cells + at, cell))
    })
}

/// The bytes of the cells, once header, length and checksum are found right.
fn checked_cells(bytes: &[u8]) -> Result<(u8, &[[u8; CELL_BYTES]]), StatisticsError> {
    let (body, sum) = bytes
        .split_last_chunk::<CHECKSUM_BYTES>()
        .ok_or(StatisticsError::Length)?;
    let (header, cells) = body
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or(StatisticsError::Length)?;
    let [magic @ .., version, _, low, high] = header;
    if magic[..] != MAGIC {
        return Err(StatisticsError::Magic);
    }
    if xxh3_64(body).to_le_bytes() != *sum {
        return Err(StatisticsError::Checksum);
    }
    if ![EARLIER_VERSION, VERSION].contains(version) {
        return Err(StatisticsError::Version(*version));
    }
    let count = usize::from(u16::from_le_bytes([*low, *high]));
    let (cells, rest) = cells.as_chunks::<CELL_BYTES>();
    if cells.len() != count || !rest.is_empty() {
        return Err(StatisticsError::Length);
    }
    Ok((*version, cells))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::draft::{Scope, Source};
    use crate::statistics::NodeFeatures;
    use crate::testing::drafted_once;

    fn node(source: Source, match_len: u32, depth: u32, share: f32) -> NodeFeatures {
        NodeFeatures {
            source,
            scope: Scope::Tenant,
            match_len,
            depth,
            count: 3,
            share,
        }
    }

    /// Some thousand observations of all kinds.
    fn learnt() -> AcceptanceStatistics {
        let mut statistics = AcceptanceStatistics::default();
        for at in 0..4000u32 {
            let source = [Source::Suffix, Source::Eagle3, Source::Prediction][at as usize % 3];
            let node = node(source, at % 40, 1 + at % 9, (at % 11) as f32 / 10.0);
            statistics.observe_node(&node, at % 5 < 3);
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
                for source in [Source::Suffix, Source::Eagle3] {
                    let node = node(source, match_len, depth, 0.5);
                    let is = read.node_probability(&node);
                    let was = statistics.node_probability(&node);
                    assert!((is - was).abs() < 2e-3, "{node:?}: {is} for {was}");
                }
            }
        }
        let draft = drafted_once(Scope::Tenant, 4, &[(5, None), (6, Some(0)), (7, Some(1))]);
        let probabilities = |of: &AcceptanceStatistics| of.path_probabilities(&draft);
        for (is, was) in probabilities(&read).iter().zip(probabilities(&statistics)) {
            assert!((is - was).abs() < 5e-3, "{is} for {was}");
        }
        assert!(read.observations() > 0);
        let empty = AcceptanceStatistics::default();
        assert_eq!(
            AcceptanceStatistics::from_bytes(&empty.to_bytes()),
            Ok(empty)
        );
    }

    /// Statistics of an earlier version, written once and kept as a file, are read for ever.
    #[test]
    fn the_committed_fixture_is_read() {
        let bytes = include_bytes!("../../tests/data/acceptance_statistics_v2.bin");
        let read = AcceptanceStatistics::from_bytes(bytes).unwrap();
        let again = AcceptanceStatistics::from_bytes(&read.to_bytes());
        assert_eq!(again.as_ref(), Ok(&read));
        assert_eq!(read.to_bytes().len(), bytes.len());
        let node = node(Source::Suffix, 7, 3, 0.5);
        let probability = read.node_probability(&node);
        assert!(
            (probability - learnt().node_probability(&node)).abs() < 2e-3,
            "{probability}"
        );
    }

    #[test]
    fn full_tables_are_within_the_limit() {
        let mut full = AcceptanceStatistics::default();
        for table in &mut full.nodes {
            let cell = Cell {
                seen: 370.0,
                accepted: 369.0,
            };
            table.resize(CELLS, cell);
        }
        for table in &mut full.drafts {
            let failures = Failures {
                expected: 700.0,
                observed: 738.0,
            };
            table.resize(RATIOS, failures);
        }
        let bytes = full.to_bytes();
        assert_eq!(bytes.len(), STATISTICS_BYTES_MAX);
        let read = AcceptanceStatistics::from_bytes(&bytes).unwrap();
        assert_eq!((read.nodes, read.drafts), (full.nodes, full.drafts));
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
        let newer = of_cells(VERSION + 1, &[]);
        assert_eq!(refusal(&newer), StatisticsError::Version(VERSION + 1));
    }

    fn of_cells(version: u8, cells: &[(u16, u16, u16)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([version, 0]);
        bytes.extend((cells.len() as u16).to_le_bytes());
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
                    is_next && first > 0 && (second <= first || at >= NODE_CELLS)
                })
            };
            let read = AcceptanceStatistics::from_bytes(&of_cells(VERSION, &cells)).map(|_| ());
            prop_assert_eq!(read, makes_sense.then_some(()).ok_or(StatisticsError::Content));
        }
    }
}
