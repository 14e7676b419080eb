//! Follows a file of tenants.

use std::path::PathBuf;

use anyhow::anyhow;

use super::taking::Taking;
use crate::tenants::file::TenantsFile;

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
        let known = TenantsFile::read_text(&path)?;
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
        let read = tokio::task::spawn_blocking(move || TenantsFile::read_text(&path)).await;
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

fn parse(text: &str) -> Result<TenantsFile, String> {
    match text.trim().is_empty() {
        true => Err("the file of tenants is empty".to_owned()),
        false => TenantsFile::parse(text),
    }
}
