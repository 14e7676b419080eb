//! Tests of an engine that drafts on its devices: the texts there, who may read them, and the length of drafts.

use std::path::Path;
use std::time::Instant;

use refrain_protocol::document::FeedCursor;
use refrain_protocol::segment::{SegmentInfo, SegmentsReply};
use refrain_suffix_index::{DocumentKey, SegmentBuilder};

use super::*;
use crate::{DeviceCommand, DeviceConfig, PaddedPart, RequestPlace};

/// A rig whose engine drafts on its devices, with files in `folder`.
fn rig(folder: &Path) -> Rig {
    rig_over(FakeStore::default(), folder, DeviceConfig::default())
}

fn rig_over(store: FakeStore, folder: &Path, config: DeviceConfig) -> Rig {
    let config = DeviceConfig {
        folder: folder.to_owned(),
        ..config
    };
    let Rig {
        proposer,
        store,
        signer,
    } = Rig::over(store, |_| {});
    let proposer = Arc::into_inner(proposer).unwrap();
    Rig {
        proposer: Arc::new(proposer.with_devices(&config, 8).unwrap()),
        store,
        signer,
    }
}

/// The text of a segment's file that a command loads.
fn loaded_text(command: &DeviceCommand) -> Vec<u32> {
    let DeviceCommand::Load {
        text_words, file, ..
    } = command
    else {
        panic!("{command:?} loads nothing");
    };
    let bytes = std::fs::read(file).unwrap();
    let words = bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word));
    words.take(*text_words as usize).collect()
}

/// Takes commands until some come.
fn await_commands(rig: &Rig) -> Vec<DeviceCommand> {
    let until = Instant::now() + PATIENCE;
    loop {
        let commands = rig.proposer.device_commands();
        if !commands.is_empty() {
            return commands;
        }
        assert!(Instant::now() < until, "no command came");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn ended_outputs_get_to_the_devices_and_removed_ones_leave_them() {
    let folder = tempfile::tempdir().unwrap();
    let rig = rig(folder.path());
    rig.begin("one", &[1, 2, 3], None);
    let place = rig.proposer.place("one").unwrap();
    assert_eq!(place.draft_tokens_max, u32::MAX);
    let namespace = place.namespace.unwrap();
    rig.proposer.extend("one", &text(100, 20));
    rig.proposer.finish("one".into(), Some("stop"));
    let [load] = &await_commands(&rig)[..] else {
        panic!("there is more than one output");
    };
    assert!(matches!(load, DeviceCommand::Load { namespace: of, .. } if *of == namespace));
    let words = loaded_text(load);
    assert!(
        words.windows(20).any(|part| part == text(100, 20)),
        "{words:?}"
    );
    rig.proposer.devices_have_loaded();
    rig.drain();
    let (document, ..) = uploaded(&rig.store).remove(0);
    rig.begin("two", &[1, 2, 3], None);
    rig.proposer.extend("two", &text(300, 20));
    rig.proposer.finish("two".into(), Some("stop"));
    wait_until(|| {
        let commands = rig.proposer.device_commands();
        let loads = commands
            .iter()
            .filter(|command| matches!(command, DeviceCommand::Load { .. }));
        let both = loads
            .map(loaded_text)
            .any(|words| words.contains(&119) && words.contains(&319));
        if !commands.is_empty() {
            rig.proposer.devices_have_loaded();
        }
        both
    });
    rig.store.push_news(FeedEvent::Remove(document));
    let commands = await_commands(&rig);
    assert!(
        matches!(commands[0], DeviceCommand::Drop { .. }),
        "{commands:?}"
    );
    let words = loaded_text(&commands[1]);
    assert!(words.contains(&319) && !words.contains(&119), "{words:?}");
}

/// A store of so many segments, with one document of 1,000 tokens in each.
fn sealed_store(segments: u64) -> FakeStore {
    let store = FakeStore::default();
    let mut content = store.content();
    let mut infos = Vec::new();
    for number in 0..segments {
        let mut builder = SegmentBuilder::new();
        builder.add(
            DocumentKey(number.into()),
            [],
            text(number as u32 * 1_000, 1_000),
        );
        let bytes = builder.build().unwrap().to_bytes();
        let words = bytes.as_chunks().0.iter();
        let words: Vec<u32> = words.map(|word| u32::from_le_bytes(*word)).collect();
        infos.push(SegmentInfo {
            segment: number,
            words: words.len() as u64,
            tokens: 1_000,
            masked: Vec::new(),
        });
        content.segment_words.insert(number, words);
    }
    content.segments = Some(SegmentsReply {
        cursor: FeedCursor {
            generation: content.generation,
            ..FeedCursor::default()
        },
        segments: infos,
        unsealed: Vec::new(),
    });
    drop(content);
    store
}

#[test]
fn no_more_is_written_than_the_devices_have_room_for() {
    let folder = tempfile::tempdir().unwrap();
    // Room for two and a half segments, of which the devices keep a tenth free.
    let config = DeviceConfig {
        bytes_max: 2_500 * 8,
        ..DeviceConfig::default()
    };
    let rig = rig_over(sealed_store(4), folder.path(), config);
    rig.begin("one", &[1, 2, 3], None);
    wait_until(|| rig.namespace().read().index().mounted().len() == 4);
    let written = || {
        let folders = std::fs::read_dir(folder.path()).unwrap();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
        files.count()
    };
    // The request brings its namespace into use.
    rig.proposer.place("one").unwrap();
    wait_until(|| written() == 2);
    let mut loaded: Vec<u32> = Vec::new();
    wait_until(|| {
        let commands = rig.proposer.device_commands();
        loaded.extend(commands.iter().map(|command| loaded_text(command)[1]));
        loaded.len() == 2
    });
    // The newest ones.
    loaded.sort_unstable();
    assert_eq!(loaded, [2_000, 3_000]);
    rig.proposer.devices_have_loaded();
    wait_until(|| written() == 0);
}

#[test]
fn a_request_without_a_namespace_has_no_place_among_others() {
    let folder = tempfile::tempdir().unwrap();
    let rig = rig(folder.path());
    let refused = RequestStart {
        request: "refused".into(),
        prompt: vec![1, 2],
        namespace: Some("no token"),
        ..RequestStart::default()
    };
    rig.proposer.begin(refused).unwrap_err();
    assert_eq!(
        rig.proposer.place("refused"),
        Some(RequestPlace {
            namespace: None,
            draft_tokens_max: u32::MAX
        })
    );
    assert_eq!(rig.proposer.place("unknown"), None);
    let other = rig.token("other");
    let begun = RequestStart {
        request: "other".into(),
        prompt: vec![1, 2],
        namespace: Some(&other),
        ..RequestStart::default()
    };
    rig.proposer.begin(begun).unwrap();
    rig.begin("mine", &[1, 2], None);
    let place = |request| rig.proposer.place(request).unwrap().namespace.unwrap();
    assert_ne!(place("other"), place("mine"));
}

/// Plays steps of requests that repeat themselves, or never do, in which a draft token costs `token_ms` and a step 10
/// ms besides. Returns the lengths that were chosen in the last steps.
fn play(repeats: bool, token_ms: f64) -> Vec<u32> {
    let folder = tempfile::tempdir().unwrap();
    let rig = rig(folder.path());
    let requests: Vec<String> = (0..8).map(|number| format!("request {number}")).collect();
    let mut texts: Vec<Vec<u32>> = Vec::new();
    for (number, request) in (0..).zip(&requests) {
        let prompt = text(number * 1_000, 40);
        rig.begin(request, &prompt, None);
        texts.push(prompt);
    }
    let (mut chosen, mut withheld, mut length) = (Vec::new(), false, 0);
    for number in 0..600u32 {
        let mut parts = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            let emitted = if repeats { length + 1 } else { 1 };
            let known = texts[at].len();
            let next = (0..emitted as usize).map(|more| match repeats {
                true => texts[at][(known + more) % 40],
                false => 1_000_000 + number * 8 + at as u32,
            });
            let next: Vec<u32> = next.collect();
            rig.proposer.extend(request, &next);
            texts[at].extend(next);
            parts.push(PaddedPart {
                request: request.clone(),
                prompt_tokens: 0,
                places: length,
                emitted,
            });
        }
        let seconds = (10.0 + token_ms * f64::from(8 * (1 + length))) / 1e3;
        rig.proposer.observe_step(seconds, parts, withheld);
        (length, withheld) = rig.proposer.length(&requests, &[0, 4, 8]);
        if number >= 300 {
            chosen.push(length);
        }
    }
    chosen
}

#[test]
fn drafts_are_long_where_they_pay_and_none_where_they_do_not() {
    let share = |chosen: &[u32], wanted: u32| {
        chosen.iter().filter(|length| **length == wanted).count() * 100 / chosen.len()
    };
    let repeating = play(true, 0.02);
    assert!(share(&repeating, 8) >= 80, "{repeating:?}");
    let novel = play(false, 1.0);
    assert!(share(&novel, 0) >= 80, "{novel:?}");
}
