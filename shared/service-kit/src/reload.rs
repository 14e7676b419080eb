//! Files that are read again when they change: certificates and secrets that are renewed under a running service.
//!
//! An actor looks at the contents and not at the time of the last change. Kubernetes exchanges a mounted Secret by a
//! symbolic link, and a time of change may stay the same over two writes. A service goes on with what it has if the
//! new contents cannot be used.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use parking_lot::{Mutex, RwLock};
use prometheus::IntCounterVec;
use ring::digest::{Context, SHA256};

use crate::actors;

/// How often the files are read.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Largest file, bytes. A bundle of all public certificate authorities has a quarter of a mebibyte.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A value that was made out of files, and is made anew when they change.
pub(crate) struct Reloaded<T> {
    current: RwLock<Arc<T>>,
    /// Rises when the value changes.
    generation: AtomicU64,
}

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// A value without files, which stays as it is.
    pub(crate) fn fixed(value: T) -> Arc<Self> {
        Arc::new(Reloaded {
            current: RwLock::new(Arc::new(value)),
            generation: AtomicU64::new(0),
        })
    }

    /// Makes a value out of the files, and follows them until the value is dropped. `name` stands for the files in
    /// logs and in the counter `reloads`.
    ///
    /// # Errors
    /// A file cannot be read, or `parse` refuses the contents.
    pub(crate) fn open(
        name: &str,
        paths: Vec<PathBuf>,
        reloads: &IntCounterVec,
        parse: impl Fn(&[Vec<u8>]) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<Arc<Self>> {
        // Both series exist from the start, so that their first count is a rise.
        for outcome in ["loaded", "refused"] {
            reloads.with_label_values(&[name, outcome]);
        }
        let contents = read(&paths)?;
        let value = Self::fixed(parse(&contents)?);
        let files = Mutex::new(Files {
            name: name.to_owned(),
            seen: Some(digest(&contents)),
            paths,
            reloads: reloads.clone(),
            parse,
        });
        let (files, follows) = (Arc::new(files), Arc::downgrade(&value));
        // Callers may have no runtime, or one whose clock a test has stopped.
        let runtime = actors::shared_runtime()?;
        let follow = move || follow(files.clone(), follows.clone());
        actors::start_on(runtime, "files that are reloaded", follow).detached();
        Ok(value)
    }

    /// The current value.
    pub(crate) fn get(&self) -> Arc<T> {
        self.current.read().clone()
    }

    /// A number that rises when the value changes.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn set(&self, value: T) {
        *self.current.write() = Arc::new(value);
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// Looks at files for as long as their value is used. Their disk may be slow, so another thread reads them.
async fn follow<T, P>(files: Arc<Mutex<Files<P>>>, value: Weak<Reloaded<T>>)
where
    T: Send + Sync + 'static,
    P: Fn(&[Vec<u8>]) -> anyhow::Result<T> + Send + 'static,
{
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(value) = value.upgrade() else { return };
        let files = files.clone();
        actors::blocking(move || files.lock().look(&value)).await;
    }
}

/// The files of a value, and their contents when they were last read.
struct Files<P> {
    name: String,
    paths: Vec<PathBuf>,
    /// `None` while a file cannot be read. Contents that were refused count as seen, so they are refused once.
    seen: Option<[u8; 32]>,
    reloads: IntCounterVec,
    parse: P,
}

impl<P> Files<P> {
    /// Reads the files, and sets the value if they have changed.
    fn look<T: Send + Sync + 'static>(&mut self, value: &Reloaded<T>)
    where
        P: Fn(&[Vec<u8>]) -> anyhow::Result<T>,
    {
        let contents = read(&self.paths);
        let digest = contents.as_ref().ok().map(|contents| digest(contents));
        if digest == self.seen {
            return;
        }
        self.seen = digest;
        // This is unwind safe because nothing of what was read is kept.
        let parse = AssertUnwindSafe(|| contents.and_then(|contents| (self.parse)(&contents)));
        let parsed = catch_unwind(parse).unwrap_or_else(|_| Err(anyhow!("reading them panicked")));
        let outcome = match parsed {
            Ok(parsed) => {
                value.set(parsed);
                tracing::info!(files = self.name, "changed files were read again");
                "loaded"
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::error!(
                    files = self.name,
                    error,
                    "changed files cannot be used; the earlier ones stay in use"
                );
                "refused"
            }
        };
        self.reloads.with_label_values(&[&self.name, outcome]).inc();
    }
}

fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<Vec<u8>>> {
    let read = |path: &PathBuf| {
        let length = std::fs::metadata(path)?.len();
        if length > FILE_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        std::fs::read(path)
    };
    paths
        .iter()
        .map(|path| read(path).with_context(|| format!("cannot read {}", path.display())))
        .collect()
}

fn digest(contents: &[Vec<u8>]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    for content in contents {
        context.update(&(content.len() as u64).to_le_bytes());
        context.update(content);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Metrics;

    fn parse(contents: &[Vec<u8>]) -> anyhow::Result<u32> {
        assert!(contents[0] != *b"panic", "planned");
        Ok(std::str::from_utf8(&contents[0])?.trim().parse()?)
    }

    #[test]
    fn a_broken_file_leaves_the_earlier_value_and_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        std::fs::write(&path, "1").unwrap();
        let metrics = Metrics::new().unwrap();
        let reloads = &metrics.http().reloads;
        let value = Reloaded::fixed(1);
        let mut files = Files {
            name: "number".into(),
            seen: Some(digest(&[b"1".to_vec()])),
            paths: vec![path.clone()],
            reloads: reloads.clone(),
            parse,
        };
        let mut look = |contents: Option<&str>| {
            match contents {
                Some(contents) => std::fs::write(&path, contents).unwrap(),
                None => std::fs::remove_file(&path).unwrap(),
            }
            files.look(&value);
            files.look(&value);
            let count = |outcome| reloads.with_label_values(&["number", outcome]).get();
            (
                *value.get(),
                value.generation(),
                count("loaded"),
                count("refused"),
            )
        };
        assert_eq!(look(Some("1")), (1, 0, 0, 0));
        assert_eq!(look(Some("2")), (2, 1, 1, 0));
        assert_eq!(look(Some("two")), (2, 1, 1, 1));
        assert_eq!(look(None), (2, 1, 1, 2));
        assert_eq!(look(Some("panic")), (2, 1, 1, 3));
        assert_eq!(look(Some("3")), (3, 2, 2, 3));
    }

    #[test]
    fn a_file_that_changes_is_followed_and_a_missing_one_is_an_error_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        let metrics = Metrics::new().unwrap();
        let reloads = &metrics.http().reloads;
        let open = || Reloaded::open("number", vec![path.clone()], reloads, parse);
        let error = format!("{:#}", open().err().unwrap());
        assert!(error.contains("number"), "{error}");
        std::fs::write(&path, "1").unwrap();
        let value = open().unwrap();
        std::fs::write(&path, "2").unwrap();
        while *value.get() != 2 {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(value.generation(), 1);
    }
}
