//! The log with an index that is lost, behind, ahead, damaged, or of another journal.

use super::*;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

const CACHE_BYTES: u64 = 4 << 20;

/// The memory of a generation, where a test fills it.
const SMALL_BYTES: u64 = 64 << 10;

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
fn what_only_a_journal_has_outlives_damage_to_its_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    fill(&open(&path).unwrap(), 0, 20);
    let log = open(&path).unwrap();
    let whole = fill(&log, 20, 50);
    // As after a crash: the index does not get the newest writes.
    log.retire();
    drop(log);
    let journal = journal::path_in(&path);
    let mut bytes = std::fs::read(&journal).unwrap();
    bytes[3] ^= 0x10;
    std::fs::write(&journal, bytes).unwrap();
    let found = journal::scan(&path, 0, &mut |_| Ok(())).unwrap();
    assert!(found.name.is_none(), "the name is damaged");
    assert!(records(&open(&path).unwrap()) == whole);
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

/// A store of that little memory writes its index all the time.
const CACHE_BYTES_SMALL: u64 = 8 << 10;

#[test]
fn reads_see_the_newest_write_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let open = || JournaledLog::open(&path, CACHE_BYTES_SMALL, IndexMode::Trust).unwrap();
    let mut expected = Records::new();
    let mut log = open();
    for round in 0..400u32 {
        let mut batch = Batch::default();
        for record in 0..6u32 {
            let number = (round * 7 + record * 13) % 90;
            let key = [&b"d"[..], &number.to_be_bytes()].concat();
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
            let (from, to) = ([&b"d"[..], &20u32.to_be_bytes()].concat(), b"d\0\0\0\x30");
            let mut part = Vec::new();
            log.scan(&from, to, &mut |key, _| {
                part.push(key.to_vec());
                part.len() < 5
            })
            .unwrap();
            let wanted = expected.range(from..to.to_vec()).take(5);
            assert_eq!(part, wanted.map(|(key, _)| key.clone()).collect::<Vec<_>>());
        }
        for number in [round % 90, 89 - round % 90] {
            let key = [&b"d"[..], &number.to_be_bytes()].concat();
            assert_eq!(log.get(&key).unwrap(), expected.get(&key).cloned());
        }
        if round % 100 == 99 {
            drop(log);
            log = open();
            assert!(records(&log) == expected, "opened in round {round}");
        }
    }
    assert!(log.inner.recent.read().bytes() < 3 * generation_bytes(CACHE_BYTES_SMALL));
}

/// A process that was killed has written some documents to the index, and not the position.
#[test]
fn an_index_that_was_written_in_part_is_completed_and_mixes_no_document() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let document = |kind: u8, number: u32| {
        let mut key = vec![kind];
        key.extend_from_slice(&[7; 28]);
        key.extend_from_slice(&number.to_be_bytes());
        key
    };
    let commit = |log: &JournaledLog, round: u8| {
        let mut batch = Batch::default();
        for number in 0..300 {
            batch.put(document(b'd', number), vec![round; 50]);
            batch.put(document(b'p', number), vec![round; 300]);
        }
        log.commit(&batch).unwrap();
        records(log)
    };
    let log = open(&path).unwrap();
    commit(&log, 1);
    drop(log);
    let log = open(&path).unwrap();
    let whole = commit(&log, 2);
    let position = log.inner.index.position().unwrap().unwrap();
    let frozen = log.inner.recent.write().freeze();
    // The documents go to the index one after the other, with all of their records.
    write_to(&log.inner.index, &frozen).unwrap();
    let ahead = log.inner.index.position().unwrap().unwrap();
    assert!(ahead.end > position.end);
    for number in 0..300 {
        let of = |kind| {
            log.inner
                .index
                .get(&document(kind, number))
                .unwrap()
                .unwrap()
        };
        assert_eq!((of(b'd')[0], of(b'p')[0]), (2, 2));
    }
    // Now as if it had been killed before the position was written.
    log.inner.index.write(&Batch::default(), position).unwrap();
    log.retire();
    drop(log);
    let log = open(&path).unwrap();
    assert!(records(&log) == whole);
    assert!(
        log.inner.recent.read().bytes() > 0,
        "the journal was read again"
    );
}

/// Has the index wait for the sender's leave, or for its end, before each generation. Returns what says so when a
/// generation begins.
fn held_index(log: &JournaledLog) -> (Sender<Result<(), LogError>>, Receiver<()>) {
    let (leave, wait) = channel();
    let (tell, told) = channel();
    let wait = Mutex::new(wait);
    let before = move || {
        let _ = tell.send(());
        wait.lock().recv().unwrap_or(Ok(()))
    };
    assert!(log.inner.before_indexing.set(Box::new(before)).is_ok());
    (leave, told)
}

/// Commits until `is_enough`. Returns the number of the next batch.
fn fill_until(log: &JournaledLog, from: u32, is_enough: impl Fn() -> bool) -> u32 {
    let mut next = from;
    while !is_enough() {
        fill(log, next, next + 10);
        next += 10;
    }
    next
}

#[test]
fn a_commit_never_waits_for_the_index_and_the_wait_for_room_does() {
    let dir = tempfile::tempdir().unwrap();
    let log = JournaledLog::open(dir.path(), SMALL_BYTES, IndexMode::Trust).unwrap();
    let (leave, told) = held_index(&log);
    log.await_room().unwrap();
    // The first generation goes to the index, which does not go on. The second one grows beyond its room.
    let next = fill_until(&log, 0, || *log.indexing.runs.lock());
    told.recv().unwrap();
    let next = fill_until(&log, next, || log.is_full());
    let whole = fill(&log, next, next + 10);
    assert!(told.try_recv().is_err() && log.is_full());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| log.await_room());
        // Only when the index goes on there is room.
        leave.send(Ok(())).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert!(!log.is_full());
    told.recv().unwrap();
    assert!(records(&log) == whole);
    drop(leave);
    drop(log);
    assert!(records(&open(dir.path()).unwrap()) == whole);
}

#[test]
fn a_failing_index_takes_back_nothing_that_is_durable_and_is_told_as_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let log = JournaledLog::open(dir.path(), SMALL_BYTES, IndexMode::Trust).unwrap();
    let (leave, _told) = held_index(&log);
    let next = fill_until(&log, 0, || *log.indexing.runs.lock());
    let refused = LogError::Refused("no room".into());
    leave.send(Err(refused.clone())).unwrap();
    log.end_indexing();
    assert!(matches!(log.fault(), Some(LogError::Refused(_))));
    log.await_room().unwrap();
    // Commits go on in memory until there is none, and what asks for room then learns why.
    let next = fill_until(&log, next, || log.is_full());
    let whole = fill(&log, next, next + 10);
    assert!(matches!(log.await_room(), Err(LogError::Refused(_))));
    // Damage is repaired at the next opening, so nothing hides it.
    log.inner.note_fault(LogError::Corrupt("a page".into()));
    log.inner.note_fault(refused);
    assert!(matches!(log.fault(), Some(LogError::Corrupt(_))));
    assert!(matches!(log.await_room(), Err(LogError::Corrupt(_))));
    drop(log);
    assert!(records(&open(dir.path()).unwrap()) == whole);
}

#[test]
fn damage_that_a_reader_meets_is_told_and_the_index_is_written_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let log = JournaledLog::open(dir.path(), SMALL_BYTES, IndexMode::Trust).unwrap();
    let (leave, told) = held_index(&log);
    let misread: Result<(), LogError> = Err(LogError::Corrupt("a page".into()));
    assert!(log.inner.note_damage(misread).is_err());
    let next = fill_until(&log, 0, || *log.indexing.runs.lock());
    told.recv().unwrap();
    let next = fill_until(&log, next, || log.is_full());
    leave.send(Ok(())).unwrap();
    log.await_room().unwrap();
    assert!(!log.is_full());
    told.recv().unwrap();
    assert!(matches!(log.fault(), Some(LogError::Corrupt(_))));
    let whole = fill(&log, next, next + 10);
    drop(leave);
    drop(log);
    let rebuilt = JournaledLog::open(dir.path(), CACHE_BYTES, IndexMode::Rebuild);
    assert!(records(&rebuilt.unwrap()) == whole);
}

#[test]
fn an_index_thread_that_panics_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let log = JournaledLog::open(dir.path(), SMALL_BYTES, IndexMode::Trust).unwrap();
    let boom = || std::panic::resume_unwind(Box::new("boom"));
    assert!(log.inner.before_indexing.set(Box::new(boom)).is_ok());
    fill_until(&log, 0, || {
        log.inner.recent.read().bytes() > log.inner.generation_bytes
    });
    log.end_indexing();
    assert!(matches!(log.fault(), Some(LogError::Corrupt(_))));
    let whole = records(&log);
    drop(log);
    assert!(records(&open(dir.path()).unwrap()) == whole);
}
