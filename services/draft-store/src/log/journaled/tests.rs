//! The log with an index that is lost, behind, ahead, damaged, or of another journal.

use super::*;

use std::collections::BTreeMap;
use std::path::Path;

const CACHE_BYTES: u64 = 4 << 20;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(path: &Path) -> Result<JournaledLog, LogError> {
    JournaledLog::open(path, CACHE_BYTES, IndexMode::Trust)
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

/// Commits some batches, and returns the records that must be there.
fn fill(log: &JournaledLog, from: u32, to: u32) -> Records {
    for number in from..to {
        let mut batch = Batch::default();
        for record in 0..5u32 {
            let key = [&b"d"[..], &(number * 5 + record).to_be_bytes()].concat();
            batch.put(key, vec![number as u8 | 1; 90]);
        }
        if number % 3 == 2 {
            batch.remove([&b"d"[..], &((number - 1) * 5).to_be_bytes()].concat());
        }
        log.commit(&batch).unwrap();
    }
    records(log)
}

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn an_index_in_any_state_is_brought_up_to_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let log = open(&path).unwrap();
    fill(&log, 0, 40);
    drop(log);
    let earlier = dir.path().join("earlier");
    copy_files(&path, &earlier);
    let log = open(&path).unwrap();
    let whole = fill(&log, 40, 90);
    drop(log);
    let spoil: [(&str, &dyn Fn()); 6] = [
        ("as it is", &|| {}),
        ("gone", &|| SledLog::delete(&path).unwrap()),
        ("behind", &|| {
            SledLog::delete(&path).unwrap();
            for entry in std::fs::read_dir(&earlier).unwrap() {
                let entry = entry.unwrap();
                if entry.file_name() != "journal" {
                    std::fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
                }
            }
        }),
        ("garbage", &|| {
            std::fs::write(path.join("db"), vec![0x5a; 1 << 20]).unwrap();
        }),
        ("empty", &|| std::fs::write(path.join("db"), []).unwrap()),
        ("unfinished", &|| {
            std::fs::write(path.join("conf"), []).unwrap();
            std::fs::write(path.join("snap.7FFFFFFFFFFFFFFF.generating"), []).unwrap();
        }),
    ];
    for (name, spoil) in spoil {
        spoil();
        let log = open(&path).unwrap();
        assert!(records(&log) == whole, "{name}");
        drop(log);
        assert!(records(&open(&path).unwrap()) == whole, "{name}, once more");
    }
}

#[test]
fn an_index_of_another_journal_is_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let [path, other] = ["log", "other"].map(|name| dir.path().join(name));
    fill(&open(&other).unwrap(), 0, 3);
    let whole = fill(&open(&path).unwrap(), 10, 60);
    SledLog::delete(&path).unwrap();
    for name in ["db", "conf"] {
        std::fs::copy(other.join(name), path.join(name)).unwrap();
    }
    assert!(records(&open(&path).unwrap()) == whole);
}

#[test]
fn a_damaged_journal_is_rewritten_from_a_complete_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let whole = fill(&open(&path).unwrap(), 0, 50);
    let journal = journal::path_in(&path);
    let bytes = std::fs::read(&journal).unwrap();
    for at in [3, 40, bytes.len() / 2, bytes.len() - 20] {
        let mut damaged = std::fs::read(&journal).unwrap();
        let at = at.min(damaged.len() - 1);
        damaged[at] ^= 0x10;
        std::fs::write(&journal, damaged).unwrap();
        assert!(records(&open(&path).unwrap()) == whole, "byte {at}");
        let found = journal::scan(&path, 0, &mut |_| Ok(())).unwrap();
        assert!(found.damage.is_empty() && found.name.is_some());
    }
    // The journal is emptied, or cut short.
    for len in [0, 700] {
        let file = std::fs::File::options().write(true).open(&journal).unwrap();
        file.set_len(len).unwrap();
        assert!(records(&open(&path).unwrap()) == whole, "{len} bytes");
    }
}

#[test]
fn a_missing_or_empty_journal_beside_an_index_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fill(&open(&path).unwrap(), 0, 20);
    let journal = journal::path_in(&path);
    std::fs::rename(&journal, dir.path().join("aside")).unwrap();
    assert!(matches!(open(&path), Err(LogError::Corrupt(_))));
    // If neither can be read, the index is not deleted: some of it may be salvaged.
    std::fs::write(&journal, []).unwrap();
    std::fs::write(path.join("conf"), vec![0xa5; 40]).unwrap();
    assert!(matches!(open(&path), Err(LogError::Corrupt(_))));
    assert!(path.join("db").metadata().unwrap().len() > 0);
}

#[test]
fn damage_that_the_index_cannot_repair_is_an_error_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fill(&open(&path).unwrap(), 0, 50);
    let journal = journal::path_in(&path);
    let mut bytes = std::fs::read(&journal).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&journal, &bytes).unwrap();
    for name in ["db", "conf"] {
        std::fs::write(path.join(name), vec![0xa5; 5_000]).unwrap();
    }
    for index in [IndexMode::Trust, IndexMode::Rebuild] {
        let refused = JournaledLog::open(&path, CACHE_BYTES, index).err().unwrap();
        assert!(matches!(refused, LogError::Corrupt(_)), "{refused}");
    }
    assert_eq!(std::fs::read(&journal).unwrap(), bytes);
    assert_eq!(std::fs::read(path.join("db")).unwrap().len(), 5_000);
}

#[test]
fn a_log_of_an_earlier_version_gets_a_journal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let db = sled::open(&path).unwrap();
    let mut whole = Records::new();
    for number in 0..20_000u32 {
        let (key, value) = ([&b"d"[..], &number.to_be_bytes()].concat(), vec![7; 100]);
        db.insert(key.clone(), value.clone()).unwrap();
        whole.insert(key, value);
    }
    db.flush().unwrap();
    drop(db);
    assert!(records(&open(&path).unwrap()) == whole);
    SledLog::delete(&path).unwrap();
    assert!(records(&open(&path).unwrap()) == whole);
}
