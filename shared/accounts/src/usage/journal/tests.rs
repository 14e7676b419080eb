use refrain_protocol::usage::UsageCounts;

use super::super::book::{Book, UsageSubject};
use super::*;

fn subject(number: u64) -> UsageSubject {
    UsageSubject {
        tenant: format!("tenant-{}", number % 3),
        key: format!("key-{number}"),
        model: "m".into(),
    }
}

fn counts(tokens: u64) -> UsageCounts {
    UsageCounts {
        requests: 1,
        output_tokens: tokens,
        ..UsageCounts::default()
    }
}

/// The records of requests that run beside each other, and of an erasure.
fn script(steps: &[(u8, u16)]) -> Vec<Record> {
    let mut records = Vec::new();
    let mut open = std::collections::BTreeMap::new();
    for (number, (kind, value)) in steps.iter().enumerate() {
        let (at_ms, request) = (number as u64 * 900_000, u64::from(kind % 4));
        if *kind == u8::MAX {
            let tenant = format!("tenant-{}", value % 3);
            records.push(Record::Erased { tenant, at_ms });
            continue;
        }
        let tokens = open.entry(request).or_insert(0);
        if *tokens == 0 {
            let subject = subject(request);
            records.push(Record::Begin { request, subject });
        }
        *tokens += 1 + u64::from(*value);
        let counts = counts(*tokens);
        match kind % 3 {
            0 => {
                open.remove(&request);
                records.push(Record::End {
                    request,
                    at_ms,
                    counts,
                });
            }
            _ => records.push(Record::Progress {
                request,
                at_ms,
                counts,
            }),
        }
    }
    records
}

fn rows(gateway: u128, records: Vec<Record>) -> Vec<refrain_protocol::usage::UsageRow> {
    Book::recovered(gateway, records).rows().collect()
}

fn written(dir: &Path, records: &[Record]) -> (u128, Vec<u8>) {
    let found = FoundJournal::read(dir, 1).unwrap();
    let gateway = found.gateway;
    let mut journal = found.journal();
    journal.rewrite(std::iter::empty()).unwrap();
    for record in records {
        journal.append(record);
        journal.write().unwrap();
    }
    let bytes = std::fs::read(dir.join(FILE)).unwrap();
    assert_eq!(journal.bytes(), bytes.len() as u64);
    (gateway, bytes)
}

/// A file that is cut anywhere has exactly the records that are whole.
#[test]
fn a_file_that_is_cut_anywhere_has_all_records_before_the_cut() {
    bolero::check!()
        .with_type::<(Vec<(u8, u16)>, u32)>()
        .with_max_len(128)
        .for_each(|(steps, cut)| {
            let records = script(steps);
            let mut file = header(7);
            let mut ends = vec![file.len()];
            for record in &records {
                append_record(record, &mut file).unwrap();
                ends.push(file.len());
            }
            let cut = *cut as usize % (file.len() + 1);
            let whole = ends.iter().filter(|end| **end <= cut).count();
            match read_file(&file[..cut]) {
                None => assert_eq!(whole, 0),
                Some((gateway, read, torn)) => {
                    assert_eq!(gateway, 7);
                    assert_eq!(read, records[..whole - 1]);
                    assert_eq!(torn, cut - ends[whole - 1]);
                    // At most the last counts of each request are lost.
                    let compact: Vec<Record> = Book::recovered(7, read.clone()).records().collect();
                    assert_eq!(rows(7, compact), rows(7, read));
                }
            }
        });
}

/// Bytes that are not what was written are noticed, wherever they are.
#[test]
fn a_changed_byte_ends_what_is_read_and_never_changes_a_count() {
    let records = script(&[(1, 5), (2, 7), (1, 9), (3, 1), (0, 2), (255, 1), (4, 4)]);
    let mut file = header(7);
    for record in &records {
        append_record(record, &mut file).unwrap();
    }
    for at in 0..file.len() {
        let mut changed = file.clone();
        changed[at] ^= 0x10;
        match read_file(&changed) {
            None => assert!(at < HEADER_BYTES),
            Some((_, read, torn)) => {
                assert!(at >= HEADER_BYTES && torn > 0);
                assert_eq!(read, records[..read.len()]);
            }
        }
    }
}

#[test]
fn a_torn_file_is_read_again_and_its_gateway_stays_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let records = script(&[(1, 5), (2, 7), (1, 9)]);
    let (gateway, bytes) = written(dir.path(), &records);
    std::fs::write(dir.path().join(FILE), &bytes[..bytes.len() - 3]).unwrap();
    let found = FoundJournal::read(dir.path(), 1).unwrap();
    assert_eq!(found.gateway, gateway);
    assert_eq!(found.records, records[..records.len() - 1]);
    let book = Book::recovered(gateway, found.records.clone());
    let mut journal = found.journal();
    journal.rewrite(book.records()).unwrap();
    assert!(!journal.is_rewrite_due());
    drop(journal);
    let again = FoundJournal::read(dir.path(), 1).unwrap();
    assert_eq!(
        rows(gateway, again.records),
        book.rows().collect::<Vec<_>>()
    );
}

#[test]
fn a_file_of_something_else_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(FILE), "not a journal").unwrap();
    let found = FoundJournal::read(dir.path(), 77).unwrap();
    assert_eq!(found.records, []);
    let aside = dir.path().join("journal.damaged-77");
    assert_eq!(std::fs::read(aside).unwrap(), b"not a journal");
}

#[test]
fn one_gateway_at_a_time_uses_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let first = FoundJournal::read(dir.path(), 1).unwrap();
    let error = FoundJournal::read(dir.path(), 1).unwrap_err().to_string();
    assert!(error.contains("another gateway"), "{error}");
    drop(first);
    FoundJournal::read(dir.path(), 1).unwrap();
}

#[test]
fn after_a_failed_write_nothing_is_appended_until_the_file_is_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let records = script(&[(1, 5), (2, 7)]);
    let (gateway, _) = written(dir.path(), &records);
    let found = FoundJournal::read(dir.path(), 1).unwrap();
    let mut book = Book::recovered(gateway, found.records.clone());
    let mut journal = found.journal();
    journal.rewrite(book.records()).unwrap();
    journal.refuse_writes().unwrap();
    let more = Record::Whole {
        subject: subject(9),
        at_ms: 5,
        counts: counts(3),
    };
    journal.append(&more);
    book.apply(more);
    assert!(journal.write().is_err());
    assert!(journal.is_rewrite_due() && journal.sync().is_err());
    journal.rewrite(book.records()).unwrap();
    journal.sync().unwrap();
    drop(journal);
    let again = FoundJournal::read(dir.path(), 1).unwrap();
    assert_eq!(
        rows(gateway, again.records),
        book.rows().collect::<Vec<_>>()
    );
}
