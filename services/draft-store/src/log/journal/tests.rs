//! The journal read back: complete, cut off at every byte, and damaged everywhere.

use super::*;

use crate::tests::format_fixtures::{fixture, is_writing};

const NAME: u64 = 7;

fn batch(number: u8, records: u8) -> Batch {
    let mut batch = Batch::default();
    for record in 0..records {
        let key = vec![b'd', number, record];
        if record % 5 == 4 {
            batch.remove(key);
        } else {
            batch.put(
                key,
                vec![number.wrapping_mul(31) ^ record | 1; 20 + record as usize],
            );
        }
    }
    batch
}

/// Writes a closed journal of some batches, and returns where each of them ends.
fn written(dir: &Path, batches: &[Batch]) -> Vec<u64> {
    let mut journal = Journal::create(dir, NAME).unwrap();
    let ends = batches
        .iter()
        .map(|batch| journal.append(batch).unwrap().end)
        .collect();
    journal.install().unwrap();
    ends
}

fn scanned(dir: &Path) -> (ScanReport, Vec<ScannedBatch>) {
    let mut batches = Vec::new();
    let found = scan(dir, 0, &mut |batch| {
        batches.push(batch);
        Ok(())
    });
    (found.unwrap(), batches)
}

fn writes(batch: &Batch) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    batch
        .writes()
        .map(|(key, value)| (key.clone(), value.cloned()))
        .collect()
}

#[test]
fn appended_batches_are_read_back_from_any_batch_on() {
    let dir = tempfile::tempdir().unwrap();
    let batches: Vec<_> = (0..20).map(|number| batch(number, 1 + number)).collect();
    let ends = written(dir.path(), &batches);
    let (found, read) = scanned(dir.path());
    assert_eq!(
        (found.name, found.end, found.damage.len()),
        (Some(NAME), ends[19], 0)
    );
    for (given, read) in batches.iter().zip(&read) {
        assert_eq!(writes(given), writes(&read.batch));
    }
    let mut rest = 0;
    scan(dir.path(), ends[11], &mut |batch| {
        assert_eq!(writes(&batch.batch), writes(&batches[12 + rest]));
        rest += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!(rest, 8);
}

#[test]
fn a_write_that_was_cut_off_is_dropped_whole_and_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let batches: Vec<_> = (0..4).map(|number| batch(number, 6)).collect();
    let ends = written(dir.path(), &batches);
    let path = path_in(dir.path());
    let whole = std::fs::read(&path).unwrap();
    for len in ends[2]..ends[3] {
        for zeros in [0, (ends[3] - len) as usize] {
            let mut bytes = whole[..len as usize].to_vec();
            bytes.extend(vec![0; zeros]);
            // Zeros that a value may end with are taken for damage, which costs a quarantine and no more.
            if zeros > 0 && zeros < 8 {
                continue;
            }
            std::fs::write(&path, &bytes).unwrap();
            let (found, read) = scanned(dir.path());
            assert_eq!(
                (found.end, found.damage.len(), read.len()),
                (ends[2], 0, 3),
                "{len} {zeros}"
            );
            // The next append takes its place.
            let mut journal = Journal::open(dir.path(), NAME, found.end).unwrap();
            assert_eq!(journal.append(&batches[3]).unwrap().end, ends[3]);
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
    }
}

#[test]
fn each_damaged_byte_costs_one_record_and_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let batches: Vec<_> = (0..3).map(|number| batch(number, 7)).collect();
    written(dir.path(), &batches);
    let path = path_in(dir.path());
    let whole = std::fs::read(&path).unwrap();
    for at in 0..whole.len() {
        for mask in [1, 0x80] {
            let mut bytes = whole.clone();
            bytes[at] ^= mask;
            std::fs::write(&path, &bytes).unwrap();
            // A journal in which all records have another version is a different case.
            let (found, read) = scanned(dir.path());
            assert_eq!(found.damage.len(), 1, "byte {at}");
            assert!(found.damage[0].contains(&(at as u64)));
            let left: usize = read.iter().map(|scanned| scanned.batch.len()).sum();
            let lost = usize::from(found.name.is_some());
            assert_eq!(left, 21 - lost, "byte {at}");
            for scanned in &read {
                for (key, value) in writes(&scanned.batch) {
                    let given = &batches[key[1] as usize];
                    assert!(writes(given).contains(&(key, value)));
                }
            }
        }
    }
}

#[test]
fn holes_of_any_size_cost_only_what_was_in_them() {
    let dir = tempfile::tempdir().unwrap();
    let batches: Vec<_> = (0..40).map(|number| batch(number, 5)).collect();
    let ends = written(dir.path(), &batches);
    let path = path_in(dir.path());
    let whole = std::fs::read(&path).unwrap();
    for (from, to) in [(0, 5_000), (100, 600), (1_000, 1_001), (2_000, 4_096)] {
        let mut bytes = whole.clone();
        bytes[from..to].fill(0xa5);
        std::fs::write(&path, &bytes).unwrap();
        let (found, read) = scanned(dir.path());
        assert_eq!(found.damage_end().map(|end| end >= to as u64), Some(true));
        // All batches beyond the hole are complete.
        let beyond = ends.iter().filter(|end| **end > to as u64).count() - 1;
        let whole_ones = read
            .iter()
            .filter(|scanned| scanned.batch.len() == 5)
            .count();
        assert!(whole_ones >= beyond, "{whole_ones} of {beyond}");
    }
}

#[test]
fn bytes_from_another_position_are_no_records() {
    let dir = tempfile::tempdir().unwrap();
    let ends = written(dir.path(), &[batch(1, 3), batch(2, 3)]);
    let path = path_in(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    let second = bytes[ends[0] as usize..].to_vec();
    bytes.extend_from_slice(&second);
    std::fs::write(&path, &bytes).unwrap();
    let (found, read) = scanned(dir.path());
    assert_eq!((read.len(), found.damage.len()), (2, 1));
}

#[test]
fn a_journal_of_another_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[]);
    let path = path_in(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[3] = 2;
    std::fs::write(&path, &bytes).unwrap();
    let refused = scan(dir.path(), 0, &mut |_| Ok(())).unwrap_err();
    assert!(refused.to_string().contains("version 2"), "{refused}");
}

#[test]
fn a_journal_that_was_removed_acknowledges_nothing() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[]);
    let (found, _) = scanned(dir.path());
    let mut journal = Journal::open(dir.path(), NAME, found.end).unwrap();
    journal.append(&batch(1, 2)).unwrap();
    journal.sync().unwrap();
    std::fs::remove_file(path_in(dir.path())).unwrap();
    journal.append(&batch(2, 2)).unwrap();
    assert!(matches!(journal.sync(), Err(LogError::Refused(_))));
    assert!(journal.append(&batch(3, 2)).is_err());
}

#[test]
fn the_format_is_that_of_the_fixture() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[batch(1, 5), batch(2, 1)]);
    let fixture = fixture("journal_v1.bin");
    if is_writing() {
        std::fs::copy(path_in(dir.path()), &fixture).unwrap();
    }
    assert_eq!(
        std::fs::read(path_in(dir.path())).unwrap(),
        std::fs::read(&fixture).unwrap()
    );
}

#[test]
fn a_write_torn_in_the_middle_is_dropped_whole_and_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let large = |number: u8| {
        let mut batch = Batch::default();
        for record in 0..100u8 {
            batch.put(vec![b'p', number, record], vec![number ^ record | 1; 90]);
        }
        batch
    };
    let ends = written(dir.path(), &[large(1), large(2)]);
    let path = path_in(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let scanned_with_hole = |sector: u64| {
        let mut bytes = whole.clone();
        bytes[sector as usize..sector as usize + 512].fill(0);
        std::fs::write(&path, &bytes).unwrap();
        scanned(dir.path())
    };
    let sectors = |from: u64, to: u64| (from.div_ceil(512) * 512..to / 512 * 512).step_by(512);
    for sector in sectors(ends[0], ends[1]) {
        let (found, read) = scanned_with_hole(sector);
        assert_eq!(
            (found.end, found.damage.len(), read.len()),
            (ends[0], 0, 1),
            "{sector}"
        );
    }
    // In a batch that another one follows, the same hole is damage: the batch was acknowledged.
    for sector in sectors(100, ends[0] - 512) {
        let (found, read) = scanned_with_hole(sector);
        assert_eq!(
            (found.end, found.damage.len(), read.len()),
            (ends[1], 1, 2),
            "{sector}"
        );
        assert_eq!(read[0].gaps.len(), 1);
        assert!(read[0].batch.len() >= 90 && read[1].gaps.is_empty());
    }
}

#[test]
fn a_gap_says_which_writes_may_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), &[batch(1, 7), batch(2, 7)]);
    let path = path_in(dir.path());
    let whole = std::fs::read(&path).unwrap();
    for at in 40..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let (_, read) = scanned(dir.path());
        for (number, scanned) in read.iter().enumerate() {
            let given = batch(number as u8 + 1, 7);
            let left: Vec<_> = scanned.batch.writes().map(|(key, _)| key.clone()).collect();
            for (key, _) in given.writes() {
                let is_told = scanned.gaps.iter().any(|gap| gap.may_hide(key));
                assert!(left.contains(key) || is_told, "byte {at}, {key:?}");
            }
        }
    }
}
