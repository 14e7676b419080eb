//! A small disk of its own for one store, which a test can make full. It needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Bytes of the disk while it is not full. It is in memory, and only takes what is written.
const BYTES: u64 = 1 << 30;

/// How often the disk is made full at most, until that succeeds.
const ATTEMPTS_MAX: usize = 100;

/// A mounted disk. It is unmounted when this is dropped.
pub(crate) struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    pub(crate) fn mount(at: &Path) -> anyhow::Result<SmallDisk> {
        std::fs::create_dir_all(at)?;
        let size = format!("size={BYTES}");
        run("mount", &["-t", "tmpfs", "-o", &size, "refrain"], at)?;
        Ok(SmallDisk { at: at.to_owned() })
    }

    /// Makes the disk as small as what is on it, or large again.
    pub(crate) fn set_full(&self, is_full: bool) -> anyhow::Result<()> {
        if !is_full {
            return self.resize(BYTES);
        }
        let mut attempts = 0;
        loop {
            let used = run("df", &["--block-size=1", "--output=used"], &self.at)?;
            let used = used.lines().last().unwrap_or_default().trim();
            let used = used.parse().with_context(|| format!("df says {used}"))?;
            match self.resize(used) {
                // The store has written more meanwhile.
                Err(_) if attempts < ATTEMPTS_MAX => attempts += 1,
                resized => return resized,
            }
        }
    }

    fn resize(&self, bytes: u64) -> anyhow::Result<()> {
        let size = format!("remount,size={bytes}");
        run("mount", &["-o", &size], &self.at).map(drop)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A process that was killed a moment ago may still hold it.
        let _ = run("umount", &["--lazy"], &self.at);
    }
}

/// Runs a program with arguments and a path. Returns its output.
fn run(program: &str, arguments: &[&str], path: &Path) -> anyhow::Result<String> {
    let output = Command::new(program).args(arguments).arg(path).output();
    let output = output.with_context(|| format!("there is no {program}"))?;
    ensure!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
