use refrain_protocol::Namespace;
use refrain_suffix_index::SearchWords;

use super::*;

fn index(bytes_max: u64, step_bytes_max: u64) -> (DeviceIndex, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = DeviceConfig {
        bytes_max,
        folder: folder.path().to_owned(),
        step_bytes_max,
        ..DeviceConfig::default()
    };
    (DeviceIndex::new(config, 2).unwrap(), folder)
}

fn namespace(tenant: &str) -> NamespaceId {
    let namespace = Namespace {
        tenant: tenant.into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    };
    namespace.id()
}

/// A part of so many words, and its file.
fn part(index: &DeviceIndex, words: usize) -> (Part, Arc<PartFile>) {
    let words = SearchWords {
        words: (0..words as u32).collect(),
        text_len: words / 2,
    };
    let number = index.next_part();
    let file = index.folder.write(number, &words).unwrap();
    (Part::new(number, &words, &file), file)
}

/// The numbers of the segments that are dropped, and of those that are loaded with their namespaces.
fn changes(commands: &[DeviceCommand]) -> (Vec<u32>, Vec<(u32, u32)>) {
    let (mut dropped, mut loaded) = (Vec::new(), Vec::new());
    for command in commands {
        match command {
            DeviceCommand::Drop { number, .. } => dropped.push(*number),
            DeviceCommand::Load {
                number, namespace, ..
            } => loaded.push((*number, *namespace)),
        }
    }
    (dropped, loaded)
}

#[test]
fn a_part_is_loaded_once_and_its_file_goes_when_the_step_is_done() {
    let (index, _folder) = index(4_000, 4_000);
    let number = index.number(namespace("a"));
    let (part, file) = part(&index, 100);
    let path = file.path().to_owned();
    index.publish(namespace("a"), vec![part.clone()]);
    let commands = index.take();
    let expected = DeviceCommand::Load {
        number: part.number,
        namespace: number,
        at: 0,
        text_words: 50,
        file: path.clone(),
    };
    assert_eq!(commands, [expected]);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!((bytes.len(), &bytes[4..8]), (400, &1u32.to_le_bytes()[..]));
    let mut file = Some(file);
    index.let_go(&part, &mut file);
    assert!(file.is_none() && path.exists(), "a step still loads it");
    assert!(index.take().is_empty() && index.is_kept(&part));
    index.has_loaded();
    assert!(!path.exists());
    assert_eq!(index.tokens(), 50);
    // A part that is gone is dropped, and another takes its place.
    let (next, _file) = self::part(&index, 60);
    index.publish(namespace("a"), vec![next.clone()]);
    let commands = index.take();
    assert_eq!(
        changes(&commands),
        (vec![part.number], vec![(next.number, number)])
    );
    assert!(matches!(commands[1], DeviceCommand::Load { at: 0, .. }));
    assert!(!index.is_kept(&part));
}

#[test]
fn namespaces_in_use_come_first_and_further_ones_are_left_out() {
    let (index, _folder) = index(4_000, 40_000);
    let (a, b) = (namespace("a"), namespace("b"));
    let numbers = [index.number(a), index.number(b)];
    let (of_a, _file_a) = part(&index, 500);
    let (of_b, _file_b) = part(&index, 500);
    index.publish(a, vec![of_a.clone()]);
    index.publish(b, vec![of_b.clone()]);
    // Both together are more than the arena may hold, and `b` was used last.
    assert_eq!(
        changes(&index.take()),
        (vec![], vec![(of_b.number, numbers[1])])
    );
    assert_eq!(index.number(a), numbers[0], "a number stays");
    let swapped = (vec![of_b.number], vec![(of_a.number, numbers[0])]);
    assert_eq!(changes(&index.take()), swapped);
    // A third namespace displaces the one that was used least recently, and nobody gets its number again.
    let third = index.number(namespace("c"));
    assert!(!numbers.contains(&third));
    assert_eq!(index.namespaces().len(), 2);
    let again = index.number(b);
    assert!(again > third);
}

#[test]
fn one_step_loads_only_so_much() {
    let (index, _folder) = index(40_000, 1_000);
    index.number(namespace("a"));
    let parts: Vec<_> = (0..3).map(|_| part(&index, 200)).collect();
    let published = parts.iter().map(|(part, _)| part.clone());
    index.publish(namespace("a"), published.collect());
    let loaded = || changes(&index.take()).1.len();
    assert_eq!([loaded(), loaded(), loaded(), loaded()], [1, 1, 1, 0]);
}

#[test]
fn folders_of_processes_that_are_gone_are_deleted() {
    let parent = tempfile::tempdir().unwrap();
    // No process has this id: it is above the highest one of Linux.
    let orphan = parent.path().join("refrain-device-4194305-0");
    std::fs::create_dir(&orphan).unwrap();
    let other = parent.path().join("refrain-device");
    std::fs::create_dir(&other).unwrap();
    let folder = PartFolder::create(parent.path()).unwrap();
    assert!(other.exists());
    assert_eq!(
        orphan.exists(),
        !std::path::Path::new("/proc/self").exists()
    );
    let left = || std::fs::read_dir(parent.path()).unwrap().count();
    let before = left();
    drop(folder);
    assert_eq!(left(), before - 1);
}
