//! The files of a log, and logs as earlier versions wrote them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The directory of the catalogue in the directory of a log.
pub(crate) fn catalog(log: &Path) -> PathBuf {
    let entries = fs::read_dir(log).unwrap().map(|entry| entry.unwrap());
    let catalogs =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("catalog-"));
    let [catalog] = &catalogs.map(|entry| entry.path()).collect::<Vec<_>>()[..] else {
        panic!("not one catalogue in {}", log.display());
    };
    catalog.clone()
}

/// Opens the sled of a store that has stopped. sled gives its lock back a little later, when its threads end.
pub(crate) fn open_sled(path: &Path) -> sled::Db {
    for _ in 0..12_000 {
        if let Ok(db) = sled::open(path) {
            return db;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    sled::open(path).unwrap()
}

/// Makes the log of a closed store one of an earlier version, which had all records in sled, beside the journal.
/// Without `is_indexed` it is one of the first version, which had no journal.
pub(crate) fn make_earlier(log: &Path, is_indexed: bool) {
    const HEADER_BYTES: usize = 24;
    let number = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    };
    fs::remove_dir_all(catalog(log)).unwrap();
    let journal = fs::read(log.join("journal")).unwrap();
    let db = open_sled(log);
    let (mut at, mut name) = (0, Vec::new());
    while at < journal.len() {
        let header = &journal[at..at + HEADER_BYTES];
        assert_eq!(header[..4], *b"RfJ\x01");
        let key_at = at + HEADER_BYTES;
        let value_at = key_at + number(&header[6..8]);
        at = value_at + number(&header[8..12]);
        let (key, value) = (&journal[key_at..value_at], &journal[value_at..at]);
        match header[4] & 1 {
            _ if key == [0] => name = value.to_vec(),
            0 => drop(db.insert(key, value).unwrap()),
            _ => drop(db.remove(key).unwrap()),
        }
    }
    if is_indexed {
        db.insert([0], [name, (at as u64).to_le_bytes().to_vec()].concat())
            .unwrap();
    } else {
        fs::remove_file(log.join("journal")).unwrap();
    }
    db.flush().unwrap();
}
