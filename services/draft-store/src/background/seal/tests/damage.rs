//! Segments whose file or name is damaged or gone.

use super::*;

use crate::directory::Manifest;
use crate::segments::directory;

/// Three segments, two of them of tenant a.
fn sealed(dir: &Path) -> (TestStore, [SegmentId; 3]) {
    let store = filled(dir);
    let first = store.seal("a");
    for document in 50..60 {
        append(&store, "a", document, TOKENS);
    }
    let second = store.seal("a");
    for document in 0..5 {
        append(&store, "b", document, TOKENS);
    }
    let theirs = store.seal("b");
    append(&store, "a", 70, TOKENS);
    (store, [first, second, theirs])
}

#[test]
fn a_damaged_or_missing_file_costs_only_its_own_documents() {
    for case in [
        "missing", "empty", "short", "index", "records", "version", "footer",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (store, [first, second, theirs]) = sealed(dir.path());
        let mut expected = store.expected.take();
        let manifest = |store: &TestStore, closed| {
            let open = store.shared.read().unwrap();
            let identity = store.core.lock().unwrap().store;
            Manifest::new(0, identity, &open.catalog, closed)
        };
        manifest(&store, true).write(dir.path()).unwrap();
        let cursors = |store: &TestStore| {
            let open = store.shared.read().unwrap();
            let catalog = &open.catalog;
            ["a", "b"].map(|tenant| catalog.cursor(names(tenant).id(), 1))
        };
        let [ours_before, theirs_before] = cursors(&store);
        drop(store);
        let file = path(dir.path(), first);
        let mut bytes = std::fs::read(&file).unwrap();
        let len = bytes.len();
        match case {
            "empty" => bytes.clear(),
            "short" => bytes.truncate(len / 2),
            "index" => bytes[1_000] ^= 1,
            "records" => bytes[len - 150] ^= 1,
            "version" => bytes[len - 68] ^= 1,
            _ => bytes[len - 40] ^= 1,
        }
        std::fs::write(&file, bytes).unwrap();
        if case == "missing" {
            std::fs::remove_file(&file).unwrap();
        }
        expected.retain(|document, _| *document >= 50);
        let store = TestStore::open(dir.path(), expected);
        assert_eq!((store.lost, &store.quarantined), (1, &None), "{case}");
        store.check();
        assert_eq!(store.mounted(), [second, theirs]);
        let [ours, theirs] = cursors(&store);
        assert_ne!(ours, ours_before, "its followers start over");
        assert_eq!(theirs, theirs_before, "those of others do not");
        let quarantined = std::fs::read_dir(dir.path())
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("quarant"))
            .count();
        assert_eq!(quarantined, usize::from(case != "missing"), "{case}");
        let expected = store.expected.take();
        drop(store);
        let store = TestStore::open(dir.path(), expected);
        assert_eq!(store.lost, 0, "the second start is an ordinary one");
        store.check();
    }
}

/// The contents of all segment files, and the names in the data directory.
fn directory_content(dir: &Path) -> (BTreeMap<String, Vec<u8>>, Vec<String>) {
    let entries = |dir: &Path| {
        let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
        let mut entries: Vec<_> = entries
            .map(|entry| (entry.file_name().into_string().unwrap(), entry.path()))
            .collect();
        entries.sort();
        entries
    };
    let segments = entries(&directory(dir)).into_iter();
    let segments = segments.map(|(name, path)| (name, std::fs::read(path).unwrap()));
    let names = entries(dir).into_iter().map(|(name, _)| name);
    (segments.collect(), names.collect())
}

#[test]
fn a_segment_of_another_version_is_refused_and_nothing_is_moved() {
    // Also if the log, which would name it, is gone, and if the segment is an orphan.
    for (version, lost) in [(1u32, "nothing"), (4, "log"), (4, "name")] {
        let dir = tempfile::tempdir().unwrap();
        let (store, [first, ..]) = sealed(dir.path());
        let open = store.shared.read().unwrap().log.clone();
        let identity = store.core.lock().unwrap().store;
        {
            let open = store.shared.read().unwrap();
            let catalog = &open.catalog;
            let manifest = Manifest::new(0, identity, catalog, true);
            manifest.write(dir.path()).unwrap();
        }
        if lost == "name" {
            let mut batch = crate::log::Batch::default();
            batch.remove(crate::record::segment_key(first));
            open.commit(&batch).unwrap();
        }
        drop((store, open));
        if lost == "log" {
            std::fs::remove_dir_all(dir.path().join("log")).unwrap();
        }
        // The file is complete with a correct checksum, as another program would write it.
        let file = path(dir.path(), first);
        let mut bytes = std::fs::read(&file).unwrap();
        assert_eq!(
            bytes[4..8],
            [1, 0, 0, 0],
            "a new index is a new version of the file too"
        );
        let footer = bytes.len() - 72;
        let index = u64::from_le_bytes(bytes[footer + 32..footer + 40].try_into().unwrap());
        bytes[footer + 4..footer + 8].copy_from_slice(&version.to_le_bytes());
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[index as usize..footer + 64]);
        bytes[footer + 64..].copy_from_slice(&checksum.to_le_bytes());
        std::fs::write(&file, &bytes).unwrap();
        let before = directory_content(dir.path());
        let refusals = [
            crate::directory::open(dir.path(), 4 << 20, 1).map(drop),
            crate::directory::inspect(dir.path(), 4 << 20, true).map(drop),
            SegmentFile::open(dir.path(), first).map(drop),
        ];
        for refusal in refusals {
            let Err(LogError::Refused(why)) = refusal else {
                panic!("{lost}: {refusal:?}");
            };
            let what = [
                file.display().to_string(),
                format!("version {version}"),
                "reads 2".into(),
                "refrain store export".into(),
            ];
            assert!(what.iter().all(|what| why.contains(what)), "{why}");
        }
        assert!(
            directory_content(dir.path()) == before,
            "{lost}: something was moved"
        );
    }
}

#[test]
fn a_damaged_name_of_a_segment_is_read_from_its_file() {
    for is_missing in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (store, [first, second, theirs]) = sealed(dir.path());
        let mut expected = store.expected.take();
        let log = store.shared.read().unwrap().log.clone();
        let key = crate::record::segment_key(first);
        let mut value = log.get(&key).unwrap().unwrap();
        value[20] ^= 1;
        let mut batch = crate::log::Batch::default();
        batch.put(key, value);
        log.commit(&batch).unwrap();
        drop((store, log));
        if is_missing {
            std::fs::remove_file(path(dir.path(), first)).unwrap();
            expected.retain(|document, _| *document >= 50);
        }
        for start in 0..2 {
            let store = TestStore::open(dir.path(), expected.clone());
            assert_eq!(store.lost, usize::from(is_missing && start == 0));
            store.check();
            let all = [first, second, theirs];
            assert_eq!(store.mounted(), all[usize::from(is_missing)..]);
        }
    }
}

#[test]
fn a_lost_log_finds_its_segments_again() {
    let dir = tempfile::tempdir().unwrap();
    let (store, segments) = sealed(dir.path());
    let mut expected = store.expected.take();
    drop(store);
    std::fs::remove_dir_all(dir.path().join("log")).unwrap();
    expected.remove(&70);
    for quarantines in [true, false] {
        let store = TestStore::open(dir.path(), expected.clone());
        assert_eq!(store.quarantined.is_some(), quarantines);
        assert_eq!(store.mounted(), segments);
        store.check();
        let open = store.shared.read().unwrap();
        let found = open.catalog.namespaces();
        assert!(found.contains(&(names("b").id(), Some(names("b")))));
    }
}

#[test]
fn every_changed_byte_of_a_segment_file_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let store = TestStore::open(dir.path(), BTreeMap::new());
    append(&store, "a", 1, 20);
    let segment = store.seal("a");
    drop(store);
    let file = path(dir.path(), segment);
    let sound = std::fs::read(&file).unwrap();
    assert!(SegmentFile::open(dir.path(), segment).is_ok());
    for at in 0..sound.len() {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&file, bytes).unwrap();
        let opened = SegmentFile::open(dir.path(), segment);
        assert!(matches!(opened, Err(LogError::Corrupt(_))), "byte {at}");
    }
    for len in 0..sound.len() {
        std::fs::write(&file, &sound[..len]).unwrap();
        let opened = SegmentFile::open(dir.path(), segment);
        assert!(matches!(opened, Err(LogError::Corrupt(_))), "length {len}");
    }
}
