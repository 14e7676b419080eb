//! Follows a file of tenants.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::taking::Taking;
use crate::tenants::file::TenantsFile;

/// Largest file, bytes: some hundred thousand keys.
const BYTES_MAX: u64 = 64 << 20;

/// A file, and what was seen of it. The content is compared, because a mounted Secret changes by links.
pub(super) struct FileFollower {
    path: PathBuf,
    taking: Taking,
    /// The text that was taken over.
    known: String,
    /// The text of the last look.
    seen: Option<String>,
    trouble: Option<String>,
}

impl FileFollower {
    /// Takes the file over.
    pub(super) fn start(path: PathBuf, taking: Taking) -> anyhow::Result<Self> {
        let known = read(&path)?;
        parse(&known)
            .and_then(|file| taking.take_over(&file))
            .map_err(|faults| anyhow!("{}: {faults}", path.display()))?;
        Ok(FileFollower {
            path,
            taking,
            known,
            seen: None,
            trouble: None,
        })
    }

    /// Looks at the file once.
    pub(super) async fn look(&mut self) {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        let text = match read {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => {
                self.taking.report(&mut self.trouble, format!("{error:#}"));
                return;
            }
            Err(_) => return,
        };
        if self.known == text {
            self.trouble = None;
            return;
        }
        // A file that is written in place may have been read half way, so two looks have to agree.
        if self.seen.as_ref() != Some(&text) {
            self.seen = Some(text);
            return;
        }
        match parse(&text).and_then(|file| self.taking.take_over(&file)) {
            Ok(()) => {
                tracing::info!("the gateway has taken the changed file of tenants over");
                (self.known, self.trouble) = (text, None);
            }
            Err(faults) => self.taking.report(&mut self.trouble, faults),
        }
    }
}

/// Reads the text of a file of tenants.
pub(in crate::tenants) fn read(path: &Path) -> anyhow::Result<String> {
    let name = || format!("the file of tenants, {}, cannot be read", path.display());
    let bytes = std::fs::metadata(path).with_context(name)?.len();
    anyhow::ensure!(
        bytes <= BYTES_MAX,
        "the file of tenants, {}, has {bytes} bytes; at most {BYTES_MAX} are read",
        path.display()
    );
    std::fs::read_to_string(path).with_context(name)
}

fn parse(text: &str) -> Result<TenantsFile, String> {
    match text.trim().is_empty() {
        true => Err("the file of tenants is empty".to_owned()),
        false => TenantsFile::parse(text),
    }
}
