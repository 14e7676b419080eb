//! A session on disk: its turns one after the other, each written before its answer ends.
//!
//! Written turns survive the end of the process at any moment. A loss of power may take the last seconds, since
//! waiting for the disk would hold up every turn.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use refrain_rpc::{append_record, read_records};

use super::turns::Turn;

const MAGIC: [u8; 8] = *b"RfTurns1";

/// The end of the names of these files.
const SUFFIX: &str = ".turns";

/// The file of a session. It is open only while a turn is written, since there may be more sessions than a process
/// may have files.
pub(super) struct SessionFile {
    path: PathBuf,
}

impl SessionFile {
    /// The file of a session, whose id is fit for the name of a file. Its first turn makes it.
    pub(super) fn new(folder: &Path, id: &str) -> Self {
        SessionFile {
            path: folder.join(format!("{id}{SUFFIX}")),
        }
    }

    /// Adds turns, all or none.
    ///
    /// # Errors
    /// The disk refuses. The file has what it had before.
    pub(super) fn append(&self, turns: &[Turn]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.path)?;
        let before = file.metadata()?.len();
        let mut bytes = Vec::new();
        if before < MAGIC.len() as u64 {
            // An earlier first write was torn.
            file.set_len(0)?;
            bytes.extend(MAGIC);
        }
        for turn in turns {
            append_record(turn, &mut bytes).map_err(io::Error::other)?;
        }
        file.write_all(&bytes).inspect_err(|_| {
            // A part of a turn would hide those after it.
            let _ = file.set_len(before);
        })
    }

    /// Removes the file, if there is one.
    ///
    /// # Errors
    /// The disk refuses.
    pub(super) fn remove(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

/// Makes the folder of sessions, and keeps other processes out of it until the file that is returned is closed.
///
/// # Errors
/// The disk refuses, or another process uses the folder.
pub(super) fn lock_folder(folder: &Path) -> io::Result<File> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)?;
    let lock = File::create(folder.join("lock"))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(io::Error::other("another process uses this folder")),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A session that was found on disk.
pub(super) struct FoundSession {
    pub(super) id: String,
    pub(super) turns: Vec<Turn>,
    pub(super) file: SessionFile,
}

/// Reads all sessions of a folder.
///
/// # Errors
/// The disk refuses.
pub(super) fn read_folder(folder: &Path) -> io::Result<Vec<FoundSession>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(id) = name.and_then(|name| name.strip_suffix(SUFFIX)) else {
            continue;
        };
        match read(&path)? {
            Some(turns) => found.push(FoundSession {
                id: id.to_owned(),
                turns,
                file: SessionFile { path },
            }),
            None => {
                tracing::warn!(file = %path.display(), "this is no file of a session; it is left alone");
            }
        }
    }
    Ok(found)
}

/// The turns of a file, which is cut behind the last whole one. `None`: it is of another kind.
fn read(path: &Path) -> io::Result<Option<Vec<Turn>>> {
    let bytes = std::fs::read(path)?;
    let Some(records) = bytes.strip_prefix(&MAGIC) else {
        let is_torn = MAGIC.starts_with(&bytes);
        return Ok(is_torn.then(Vec::new));
    };
    let (turns, torn) = read_records(records);
    if torn > 0 {
        tracing::warn!(file = %path.display(), bytes = torn, "the end of a session's file was torn, and is cut off");
        let file = OpenOptions::new().append(true).open(path)?;
        file.set_len((bytes.len() - torn) as u64)?;
    }
    Ok(Some(turns))
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
        let file = SessionFile::new(folder.path(), "s");
        let path = folder.path().join("s.turns");
        let mut lengths = vec![MAGIC.len()];
        for token in 0..3 {
            file.append(&[turn(token)]).unwrap();
            lengths.push(std::fs::read(&path).unwrap().len());
        }
        let whole = std::fs::read(&path).unwrap();
        for end in (0..=whole.len()).rev() {
            std::fs::write(&path, &whole[..end]).unwrap();
            let [found] = read_folder(folder.path()).unwrap().try_into().ok().unwrap();
            let count = lengths
                .iter()
                .skip(1)
                .filter(|length| **length <= end)
                .count();
            let expected: Vec<Turn> = (0..count as u32).map(turn).collect();
            assert_eq!(found.turns, expected, "at {end}");
            // The next one is readable.
            found.file.append(&[turn(9)]).unwrap();
            let [found] = read_folder(folder.path()).unwrap().try_into().ok().unwrap();
            assert_eq!(found.turns.last(), Some(&turn(9)), "at {end}");
            assert_eq!(found.turns.len(), count + 1, "at {end}");
        }
    }

    #[test]
    fn other_files_are_left_alone_and_other_processes_kept_out() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let lock = lock_folder(&folder).unwrap();
        for name in ["note.txt", "x.turns"] {
            std::fs::write(folder.join(name), "mine").unwrap();
        }
        assert!(read_folder(&folder).unwrap().is_empty());
        assert_eq!(std::fs::read(folder.join("x.turns")).unwrap(), b"mine");
        assert!(lock_folder(&folder).is_err());
        drop(lock);
        assert!(lock_folder(&folder).is_ok());
        let file = SessionFile::new(&folder, "s");
        file.append(&[turn(1)]).unwrap();
        file.remove().unwrap();
        file.remove().unwrap();
        assert!(read_folder(&folder).unwrap().is_empty());
    }
}
