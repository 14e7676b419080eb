//! The segments that go to the devices, as files in memory.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use anyhow::Context as _;
use refrain_service_kit::random;
use refrain_suffix_index::SearchWords;

/// The beginning of the names of folders. The process id stands behind it.
const FOLDER: &str = "refrain-device-";

/// The folder of this process. It is deleted at its end.
pub(super) struct PartFolder {
    path: PathBuf,
}

impl PartFolder {
    /// Makes a folder that only this user can read, in `parent`. Folders of processes that are gone are deleted: a
    /// process that was killed leaves texts behind.
    pub(super) fn create(parent: &Path) -> anyhow::Result<Self> {
        delete_orphans(parent);
        let name = format!("{FOLDER}{}-{:016x}", std::process::id(), random::u64()?);
        let path = parent.join(name);
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).with_context(|| {
            format!(
                "device.folder: cannot make a folder in {}; name another one",
                parent.display()
            )
        })?;
        Ok(PartFolder { path })
    }

    /// Writes the words of a segment to a file.
    pub(super) fn write(&self, number: u32, words: &SearchWords) -> std::io::Result<Arc<PartFile>> {
        let file = PartFile {
            path: self.path.join(number.to_string()),
        };
        let mut out = BufWriter::with_capacity(1 << 20, fs::File::create(&file.path)?);
        for word in &words.words {
            out.write_all(&word.to_le_bytes())?;
        }
        out.flush()?;
        Ok(Arc::new(file))
    }
}

impl Drop for PartFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn delete_orphans(parent: &Path) {
    let is_gone = |name: &str| {
        let id = name.strip_prefix(FOLDER)?.split('-').next()?;
        let id: u32 = id.parse().ok()?;
        // Elsewhere than on Linux nothing says which processes run, and folders stay.
        (Path::new("/proc/self").exists() && !Path::new("/proc").join(id.to_string()).exists())
            .then_some(())
    };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(is_gone).is_some() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The file of a segment, which is deleted when nobody needs it any more.
pub(super) struct PartFile {
    path: PathBuf,
}

impl PartFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A segment of a namespace that should be on the devices.
#[derive(Clone)]
pub(super) struct Part {
    pub(super) number: u32,
    words: u64,
    pub(super) text_words: u64,
    /// Its file, as long as the exporter or a step that loads it holds that.
    file: Weak<PartFile>,
}

impl Part {
    pub(super) fn new(number: u32, words: &SearchWords, file: &Arc<PartFile>) -> Self {
        Part {
            number,
            words: words.words.len() as u64,
            text_words: words.text_len as u64,
            file: Arc::downgrade(file),
        }
    }

    /// Its length, words.
    pub(super) fn words(&self) -> u64 {
        self.words
    }

    pub(super) fn file(&self) -> Option<Arc<PartFile>> {
        self.file.upgrade()
    }
}
