//! Two hundred random damages to the log of a closed store. Only what the damage touched is lost.

use std::fs;

use super::files::copy;
use super::logs::catalog;
use super::*;

const DOCUMENTS: u128 = 60;
const CASES: u64 = 200;

/// A small generator, so that a case can be repeated by its number.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

fn text(document: u128) -> Vec<TokenId> {
    (0..150 + document as u32 * 3)
        .map(|at| (at * 7919 + document as u32 * 31) % 30_000)
        .collect()
}

/// Damages one file at one place. Returns how many bytes, and a description.
fn damage(random: &mut Random, path: &Path) -> (u64, String) {
    let mut bytes = fs::read(path).unwrap();
    let len = bytes.len() as u64;
    let kind = random.below(6);
    let at = random.below(len.max(1)) as usize;
    let most = [1, 20, 2_000, 1, 1, 1][kind as usize].min(bytes.len() - at.min(bytes.len()));
    let touched = match kind {
        0..=2 => {
            for byte in &mut bytes[at..at + most] {
                *byte ^= 1 << random.below(8);
            }
            most as u64
        }
        3 => {
            // The end of the file is missing, as long as a few documents.
            let cut = random.below(3_000.min(len + 1));
            bytes.truncate((len - cut) as usize);
            cut
        }
        4 => {
            let end = bytes.len().min(at + 4_096);
            bytes[at..end].fill(0);
            (end - at) as u64
        }
        _ => {
            if path.ends_with("journal") {
                bytes[at] = !bytes[at];
                1
            } else {
                bytes.clear();
                len
            }
        }
    };
    fs::write(path, bytes).unwrap();
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    (
        touched,
        format!("{name}: kind {kind} at {at}, {touched} bytes"),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_documents_touched_by_the_damage_are_lost() {
    let pristine = tempfile::tempdir().unwrap();
    let store = Store::start(config(pristine.path())).await;
    for document in 0..DOCUMENTS {
        let sent = finished(update(document, 0, &text(document)));
        store.append("a", vec![sent]).await.unwrap();
    }
    store.stop().await;
    let journal_bytes = fs::metadata(pristine.path().join("data/log/journal"))
        .unwrap()
        .len();
    let document_bytes = journal_bytes / DOCUMENTS as u64;
    let (mut lost_at_all, mut quarantines) = (0, 0.0);
    for case in 0..CASES {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (case + 1) << 20);
        random.below(1);
        let dir = tempfile::tempdir().unwrap();
        copy(pristine.path(), dir.path());
        let log = dir.path().join("data/log");
        // Either any one file of the catalogue is damaged, or the journal is, with the catalogue gone or not.
        let (most, what) = if case % 2 == 0 {
            let mut files: Vec<_> = fs::read_dir(catalog(&log))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_file())
                .collect();
            files.sort();
            let file = files[random.below(files.len() as u64) as usize].clone();
            (0, damage(&mut random, &file).1)
        } else {
            if case % 4 == 1 {
                fs::write(catalog(&log).join("db"), vec![0x3c; 100_000]).unwrap();
            }
            let (touched, what) = damage(&mut random, &log.join("journal"));
            // The documents in it, one cut on each side, and a neighbour.
            (touched / document_bytes + 3, what)
        };
        let store = Store::start(config(dir.path())).await;
        // The writer removes partly lost documents once a reader has found them.
        let mut follower = Follower::default();
        for _ in 0..500 {
            follower = Follower::default();
            let is_caught_up = follower.try_catch_up(&store, "a").await.is_ok();
            let documents = store.handle().observe().stats.documents;
            if is_caught_up && documents == follower.texts.len() as u64 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let lost = DOCUMENTS as u64 - follower.texts.len() as u64;
        assert!(
            lost <= most,
            "case {case}, {what}: {lost} lost, {most} at most"
        );
        for (document, tokens) in &follower.texts {
            assert!(
                *tokens == text(*document),
                "case {case}, {what}: another text"
            );
        }
        lost_at_all += lost;
        quarantines += store.metric("refrain_draft_store_quarantines_total");
        store
            .append("a", vec![update(999, 0, &[1, 2, 3])])
            .await
            .unwrap();
        store.stop().await;
    }
    println!("{lost_at_all} documents lost in {CASES} cases, {quarantines} quarantines");
    assert!(quarantines > 10.0, "hardly anything was damaged");
}
