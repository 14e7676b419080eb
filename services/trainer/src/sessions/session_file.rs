//! A session on disk: its turns one after the other, each written before its answer ends.
//!
//! Written turns survive the end of the process at any moment. A loss of power may take the last seconds, since
//! waiting for the disk would hold up every turn.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use refrain_rpc::{append_record, read_records};

use super::turns::Turn;

const MAGIC: [u8; 8] = *b"RfTurns1";

/// The end of the names of these files.
const SUFFIX: &str = ".turns";

/// The open file of a session.
pub(super) struct SessionFile {
    path: PathBuf,
    file: File,
}

impl SessionFile {
    /// Begins the file of a session, whose id is fit for the name of a file.
    ///
    /// # Errors
    /// The disk refuses.
    pub(super) fn create(folder: &Path, id: &str) -> io::Result<Self> {
        let path = folder.join(format!("{id}{SUFFIX}"));
        let mut options = OpenOptions::new();
        let mut file = options
            .create_new(true)
            .append(true)
            .mode(0o600)
            .open(&path)?;
        file.write_all(&MAGIC)?;
        Ok(SessionFile { path, file })
    }

    /// Adds turns, all or none.
    ///
    /// # Errors
    /// The disk refuses. The file ends where it did before.
    pub(super) fn append(&mut self, turns: &[Turn]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for turn in turns {
            append_record(turn, &mut bytes).map_err(io::Error::other)?;
        }
        let before = self.file.metadata()?.len();
        self.file.write_all(&bytes).inspect_err(|_| {
            // A part of a turn would hide those after it.
            let _ = self.file.set_len(before);
        })
    }

    /// Removes the file.
    ///
    /// # Errors
    /// The disk refuses.
    pub(super) fn remove(self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

/// A session that was found on disk.
pub(super) struct FoundSession {
    pub(super) id: String,
    pub(super) turns: Vec<Turn>,
    pub(super) file: SessionFile,
}

/// Reads all sessions of a folder, which is made if it is missing.
///
/// # Errors
/// The disk refuses.
pub(super) fn read_folder(folder: &Path) -> io::Result<Vec<FoundSession>> {
    std::fs::create_dir_all(folder)?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(id) = name.and_then(|name| name.strip_suffix(SUFFIX)) else {
            continue;
        };
        match read(&path)? {
            Some((turns, file)) => found.push(FoundSession {
                id: id.to_owned(),
                turns,
                file: SessionFile { path, file },
            }),
            None => {
                tracing::warn!(file = %path.display(), "this is no file of a session; it is left alone");
            }
        }
    }
    Ok(found)
}

/// The turns of a file, which is cut behind the last whole one. `None`: it is of another kind.
fn read(path: &Path) -> io::Result<Option<(Vec<Turn>, File)>> {
    let bytes = std::fs::read(path)?;
    let Some(records) = bytes.strip_prefix(&MAGIC) else {
        return Ok(None);
    };
    let (turns, torn) = read_records(records);
    let file = OpenOptions::new().append(true).open(path)?;
    if torn > 0 {
        tracing::warn!(file = %path.display(), bytes = torn, "the last turn of a session was torn, and is cut off");
        file.set_len((bytes.len() - torn) as u64)?;
    }
    Ok(Some((turns, file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(token: u32) -> Turn {
        Turn {
            output: vec![token],
            logprobs: vec![-0.5],
            finish: "stop".to_owned(),
            digest: Some(u128::MAX - u128::from(token)),
            ..Turn::default()
        }
    }

    #[test]
    fn whole_turns_are_found_again_wherever_the_file_ends() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = SessionFile::create(folder.path(), "s").unwrap();
        let mut lengths = vec![file.file.metadata().unwrap().len()];
        for token in 0..3 {
            file.append(&[turn(token)]).unwrap();
            lengths.push(file.file.metadata().unwrap().len());
        }
        let path = folder.path().join("s.turns");
        let whole = std::fs::read(&path).unwrap();
        for end in (MAGIC.len()..=whole.len()).rev() {
            std::fs::write(&path, &whole[..end]).unwrap();
            let [mut found] = read_folder(folder.path()).unwrap().try_into().ok().unwrap();
            let count = lengths
                .iter()
                .filter(|length| **length <= end as u64)
                .count()
                - 1;
            let expected: Vec<Turn> = (0..count as u32).map(turn).collect();
            assert_eq!(found.turns, expected, "at {end}");
            // The next one is readable.
            found.file.append(&[turn(9)]).unwrap();
            let [found] = read_folder(folder.path()).unwrap().try_into().ok().unwrap();
            assert_eq!(found.turns.last(), Some(&turn(9)), "at {end}");
        }
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["note.txt", "x.turns"] {
            std::fs::write(folder.path().join(name), "mine").unwrap();
        }
        assert!(read_folder(folder.path()).unwrap().is_empty());
        assert_eq!(
            std::fs::read(folder.path().join("x.turns")).unwrap(),
            b"mine"
        );
        let file = SessionFile::create(folder.path(), "s").unwrap();
        assert!(SessionFile::create(folder.path(), "s").is_err());
        file.remove().unwrap();
        assert!(read_folder(folder.path()).unwrap().is_empty());
    }
}
