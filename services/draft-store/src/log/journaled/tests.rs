//! The log with a catalogue that is lost, behind, damaged, or of another journal, and logs of earlier versions.

use super::*;

use std::collections::BTreeMap;

use crate::log::journal::{JournalPosition, ScanReport};
use crate::tests::test_store::copy_directory;

const CACHE_BYTES: u64 = 4 << 20;

/// The name of a damage, and its cause.
type Spoil<'a> = (&'a str, &'a dyn Fn(&Path));

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(path: &Path) -> Result<JournaledLog, LogError> {
    JournaledLog::open(path, CACHE_BYTES)
}

fn records(log: &JournaledLog) -> Records {
    let mut records = Records::new();
    log.scan(&[], &[u8::MAX], &mut |key, value| {
        records.insert(key.to_vec(), value.to_vec());
        true
    })
    .unwrap();
    records
}

/// Kinds of records before, between and after those that are in memory.
const KINDS: [u8; 5] = *b"adgpu";

fn key(kind: u8, number: u32) -> Vec<u8> {
    [&[kind][..], &number.to_be_bytes()].concat()
}

/// Commits some batches, and returns the records that must be there.
fn fill(log: &JournaledLog, from: u32, to: u32) -> Records {
    for number in from..to {
        let mut batch = Batch::default();
        for (record, kind) in (0..).zip(KINDS) {
            batch.put(key(kind, number * 5 + record), vec![number as u8 | 1; 90]);
        }
        if number % 3 == 2 {
            batch.remove(key(b'a', (number - 1) * 5));
            batch.remove(key(b'd', (number - 1) * 5 + 1));
        }
        log.commit(&batch).unwrap();
    }
    records(log)
}

fn scanned(path: &Path) -> ScanReport {
    journal::scan(path, 0, &mut |_| Ok(())).unwrap()
}

/// The catalogue of a closed log.
fn catalog_of(path: &Path) -> PathBuf {
    catalog_beside(path, scanned(path).name).unwrap().unwrap()
}

fn flip(file: &Path, at: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    let at = at.min(bytes.len() - 1);
    bytes[at] ^= 0x10;
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn a_catalogue_in_any_state_is_brought_up_to_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open(&path).unwrap();
    fill(&log, 0, 40);
    drop(log);
    let (catalog, earlier) = (catalog_of(&path), dir.path().join("earlier"));
    copy_directory(&catalog, &earlier);
    let log = open(&path).unwrap();
    let whole = fill(&log, 40, 90);
    drop(log);
    let remove = || std::fs::remove_dir_all(&catalog).unwrap();
    let spoil: [(&str, &dyn Fn()); 7] = [
        ("as it is", &|| {}),
        ("gone", &remove),
        ("behind", &|| {
            remove();
            copy_directory(&earlier, &catalog);
        }),
        ("garbage", &|| {
            std::fs::write(catalog.join("db"), vec![0x5a; 1 << 20]).unwrap();
        }),
        ("empty", &|| {
            std::fs::write(catalog.join("db"), []).unwrap();
        }),
        ("unfinished", &|| {
            std::fs::write(catalog.join("conf"), []).unwrap();
            std::fs::write(catalog.join("snap.7FFFFFFFFFFFFFFF.generating"), []).unwrap();
        }),
        ("beside a leftover", &|| {
            copy_directory(&earlier, &catalog_beside_of(&path, 7));
        }),
    ];
    for (name, spoil) in spoil {
        spoil();
        let log = open(&path).unwrap();
        assert!(records(&log) == whole, "{name}");
        drop(log);
        assert!(records(&open(&path).unwrap()) == whole, "{name}, once more");
        assert!(!catalog_beside_of(&path, 7).exists());
    }
}

fn catalog_beside_of(path: &Path, journal: u64) -> PathBuf {
    files::catalog_path(path, journal)
}

#[test]
fn a_catalogue_of_another_journal_is_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let [path, other] = ["log", "other"].map(|name| dir.path().join(name));
    fill(&open(&other).unwrap(), 0, 3);
    let whole = fill(&open(&path).unwrap(), 10, 60);
    let catalog = catalog_of(&path);
    std::fs::remove_dir_all(&catalog).unwrap();
    copy_directory(&catalog_of(&other), &catalog);
    assert!(records(&open(&path).unwrap()) == whole);
}

#[test]
fn text_is_never_in_the_catalogue_and_small_records_are() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open(&path).unwrap();
    fill(&log, 0, 40);
    log.rewrite(&AtomicBool::new(false), &|_| Ok(())).unwrap();
    let whole = fill(&log, 0, 20);
    drop(log);
    for rebuilds in [false, true] {
        if rebuilds {
            delete_catalogs(&path, None).unwrap();
            drop(open(&path).unwrap());
        }
        let catalog = SledCatalog::open(&catalog_of(&path), CACHE_BYTES).unwrap();
        let mut kept = Records::new();
        catalog
            .scan(&[], &[u8::MAX], &mut |key, value| {
                kept.insert(key.to_vec(), value.to_vec());
                true
            })
            .unwrap();
        let mut small = whole.clone();
        small.retain(|key, _| !RecordKind::is_short_lived(key));
        assert!(kept == small && !kept.is_empty());
    }
}

#[test]
fn a_journal_that_has_lost_something_is_an_error_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let pristine = dir.path().join("pristine");
    fill(&open(&pristine).unwrap(), 0, 50);
    let len = std::fs::metadata(journal::path_in(&pristine))
        .unwrap()
        .len();
    let cut = |journal: &Path, len| {
        let file = std::fs::File::options().write(true).open(journal);
        file.unwrap().set_len(len).unwrap();
    };
    let spoil: [Spoil; 7] = [
        ("its name", &|journal| flip(journal, 3)),
        ("its beginning", &|journal| flip(journal, 40)),
        ("its middle", &|journal| flip(journal, len as usize / 2)),
        ("its end", &|journal| flip(journal, len as usize - 20)),
        ("the last batches", &|journal| cut(journal, len - 700)),
        ("all", &|journal| cut(journal, 0)),
        ("the file", &|journal| {
            std::fs::remove_file(journal).unwrap();
        }),
    ];
    for (number, (what, spoil)) in spoil.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        copy_directory(&pristine, &path);
        let journal = journal::path_in(&path);
        spoil(&journal);
        let before = std::fs::read(&journal).ok();
        for _ in 0..2 {
            let refused = open(&path).err();
            assert!(matches!(refused, Some(LogError::Corrupt(_))), "{what}");
            assert_eq!(std::fs::read(&journal).ok(), before, "{what}");
            assert!(files::has_catalogs(&path).unwrap(), "{what}");
        }
    }
}

/// A log that was being created and one without any file are empty.
#[test]
fn a_log_that_was_never_complete_is_new() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let refused = JournaledLog::create(&path, CACHE_BYTES, |put| {
        let mut batch = Batch::default();
        batch.put(key(b'n', 1), vec![1]);
        put(&batch)?;
        let begun = dir.path().join("begun");
        copy_directory(&path, &begun);
        Err::<(), _>(LogError::Refused("broken off".into()))
    });
    assert!(refused.is_err());
    assert_eq!(
        std::fs::read_dir(&path).unwrap().count(),
        0,
        "nothing is left"
    );
    for name in ["begun", "log", "none"] {
        let log = open(&dir.path().join(name)).unwrap();
        assert!(log.is_empty().unwrap(), "{name}");
    }
}

#[test]
fn reads_see_the_newest_write_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let mut expected = Records::new();
    let mut log = open(&path).unwrap();
    let number_key = |number: u32| key(KINDS[number as usize / 20], number);
    for round in 0..400u32 {
        let mut batch = Batch::default();
        for record in 0..6u32 {
            let key = number_key((round * 7 + record * 13) % 90);
            if (round + record) % 4 == 0 {
                batch.remove(key.clone());
                expected.remove(&key);
            } else {
                let value = vec![round as u8; 20 + record as usize * 30];
                batch.put(key.clone(), value.clone());
                expected.insert(key, value);
            }
        }
        log.commit(&batch).unwrap();
        if round % 50 == 7 {
            assert!(records(&log) == expected, "round {round}");
            for (from, to) in [(0, 85), (21, 39), (25, 65), (40, 60), (50, 40)] {
                let (from, to) = (number_key(from), number_key(to));
                let mut part = Vec::new();
                log.scan(&from, &to, &mut |key, _| {
                    part.push(key.to_vec());
                    part.len() < 25
                })
                .unwrap();
                let wanted = expected
                    .iter()
                    .filter(|(key, _)| from <= **key && **key < to);
                let wanted: Vec<_> = wanted.take(25).map(|(key, _)| key.clone()).collect();
                assert_eq!(part, wanted);
            }
        }
        for number in [round % 90, 89 - round % 90] {
            let key = number_key(number);
            assert_eq!(log.get(&key).unwrap(), expected.get(&key).cloned());
        }
        if round % 100 == 99 {
            drop(log);
            log = open(&path).unwrap();
            assert!(records(&log) == expected, "opened in round {round}");
        }
    }
}

#[test]
fn a_failing_catalogue_takes_back_nothing_that_is_durable_and_is_told_as_a_fault() {
    for damages in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = open(&path).unwrap();
        let whole = fill(&log, 0, 10);
        let failed = match damages {
            true => LogError::Corrupt("a page".into()),
            false => LogError::Refused("no room".into()),
        };
        assert!(log.note::<()>(Err(failed)).is_err());
        assert!(log.fault().is_some());
        let mut batch = Batch::default();
        batch.put(key(b'd', 1_000), vec![1]);
        assert!(log.commit(&batch).is_err(), "nothing more is acknowledged");
        let rewritten = log.rewrite(&AtomicBool::new(false), &|_| Ok(()));
        assert!(matches!(rewritten, Err(LogError::Refused(_))));
        let has_catalog = files::has_catalogs(&path).unwrap();
        assert_eq!(has_catalog, !damages, "a damaged one is built again");
        drop(log);
        assert!(records(&open(&path).unwrap()) == whole);
    }
}

/// A failed sync cuts off what it could not make durable. The catalogue must not count it.
#[test]
fn a_catalogue_is_never_ahead_of_what_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open(&path).unwrap();
    let whole = fill(&log, 0, 10);
    let durable = log.journals.lock().current.position().end;
    let mut batch = Batch::default();
    batch.put(key(b'd', 1_000), vec![1]);
    log.journals.lock().current.append(&batch).unwrap();
    drop(log);
    let file = std::fs::File::options()
        .write(true)
        .open(journal::path_in(&path));
    file.unwrap().set_len(durable).unwrap();
    assert!(records(&open(&path).unwrap()) == whole);
}

/// Turns a closed log into one of an earlier version, whose sled has all records and is beside the journal. `until`
/// tells how far in the journal it is complete, and is not told by the first version.
fn make_earlier(path: &Path, whole: &Records, until: Option<u64>) {
    let name = scanned(path).name.unwrap();
    delete_catalogs(path, None).unwrap();
    let db = sled::open(path).unwrap();
    for (key, value) in whole {
        db.insert(key.as_slice(), value.as_slice()).unwrap();
    }
    if let Some(end) = until {
        let position = JournalPosition { journal: name, end };
        db.insert([0u8], &position.to_bytes()).unwrap();
    }
    db.flush().unwrap();
}

/// A log of an earlier version, filled by some batches, of which sled has the first ones.
fn earlier(path: &Path, indexed: u32, all: u32) -> Records {
    let log = open(path).unwrap();
    let first = fill(&log, 0, indexed);
    let until = log.journals.lock().current.position().end;
    let whole = fill(&log, indexed, all);
    drop(log);
    make_earlier(path, &first, Some(until));
    whole
}

fn is_upgraded(path: &Path) -> bool {
    !earlier_version::is_in(path) && !path.join("conf").exists() && scanned(path).damage.is_empty()
}

#[test]
fn a_log_of_an_earlier_version_goes_on_with_a_catalogue() {
    for spoils in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let whole = earlier(&path, 20, 50);
        if spoils {
            std::fs::write(path.join("db"), vec![0x5a; 1 << 20]).unwrap();
        }
        assert!(records(&open(&path).unwrap()) == whole);
        assert!(is_upgraded(&path));
        assert!(records(&open(&path).unwrap()) == whole, "once more");
    }
}

#[test]
fn a_damaged_journal_of_an_earlier_version_is_rewritten_from_its_complete_sled() {
    let dir = tempfile::tempdir().unwrap();
    let pristine = dir.path().join("pristine");
    let whole = earlier(&pristine, 50, 50);
    let len = std::fs::metadata(journal::path_in(&pristine))
        .unwrap()
        .len();
    for at in [3, 40, len / 2, len - 20] {
        let path = dir.path().join(at.to_string());
        copy_directory(&pristine, &path);
        flip(&journal::path_in(&path), at as usize);
        assert!(records(&open(&path).unwrap()) == whole, "byte {at}");
        assert!(is_upgraded(&path));
    }
    // The journal is emptied, or cut short.
    for left in [0, 700] {
        let path = dir.path().join(format!("cut-{left}"));
        copy_directory(&pristine, &path);
        let journal = std::fs::File::options()
            .write(true)
            .open(journal::path_in(&path));
        journal.unwrap().set_len(left).unwrap();
        assert!(records(&open(&path).unwrap()) == whole, "{left} bytes");
        assert!(is_upgraded(&path));
    }
}

#[test]
fn what_only_a_journal_of_an_earlier_version_has_outlives_damage_to_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let whole = earlier(&path, 20, 50);
    flip(&journal::path_in(&path), 3);
    assert!(scanned(&path).name.is_none(), "the name is damaged");
    assert!(records(&open(&path).unwrap()) == whole);
}

#[test]
fn a_log_of_the_first_version_gets_a_journal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let db = sled::open(&path).unwrap();
    let mut whole = Records::new();
    for number in 0..20_000u32 {
        let (key, value) = (key(KINDS[number as usize % 5], number), vec![7; 100]);
        db.insert(key.clone(), value.clone()).unwrap();
        whole.insert(key, value);
    }
    db.flush().unwrap();
    drop(db);
    assert!(records(&open(&path).unwrap()) == whole);
    assert!(is_upgraded(&path));
    assert!(records(&open(&path).unwrap()) == whole);
}

#[test]
fn damage_that_an_earlier_version_cannot_repair_is_an_error_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let pristine = dir.path().join("pristine");
    earlier(&pristine, 50, 50);
    let garbage = |path: &Path| {
        for name in ["db", "conf"] {
            std::fs::write(path.join(name), vec![0xa5; 5_000]).unwrap();
        }
    };
    let spoil: [Spoil; 3] = [
        ("both", &|path| {
            let journal = journal::path_in(path);
            flip(
                &journal,
                std::fs::metadata(&journal).unwrap().len() as usize / 2,
            );
            garbage(path);
        }),
        ("an emptied journal", &|path| {
            std::fs::write(journal::path_in(path), []).unwrap();
            garbage(path);
        }),
        ("a missing journal", &|path| {
            std::fs::remove_file(journal::path_in(path)).unwrap();
        }),
    ];
    for (number, (what, spoil)) in spoil.into_iter().enumerate() {
        let path = dir.path().join(number.to_string());
        copy_directory(&pristine, &path);
        spoil(&path);
        let before = std::fs::read(journal::path_in(&path)).ok();
        assert!(matches!(open(&path), Err(LogError::Corrupt(_))), "{what}");
        assert_eq!(
            std::fs::read(journal::path_in(&path)).ok(),
            before,
            "{what}"
        );
        assert!(path.join("db").metadata().unwrap().len() > 0, "{what}");
    }
}
