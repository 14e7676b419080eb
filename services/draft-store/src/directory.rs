//! The data directory: locking it, opening it, and recovering what is damaged.
//!
//! ```text
//! <data_dir>/lock              held by the process that uses the directory
//! <data_dir>/log/, log-<n>/    a journal, and a catalogue in sled; the manifest names the log in use
//! <data_dir>/segments/         sealed documents; the log names the segments in use
//! <data_dir>/manifest.json     the minimum that the store must hold, and the last time it knew
//! <data_dir>/quarantine-<ms>/  a log or segments that could not be read in full; kept for the operator
//! ```
//!
//! The journal is the truth. A catalogue that does not open, or that holds a damaged record, is built again from it.
//! The log moves to quarantine only if the journal itself has lost something. Everything that still decodes is then
//! copied into a new log under a new generation, so that followers start over. Segments are adopted as they are.
//!
//! A missing or damaged segment costs only its own documents. A segment of a format version that this program does
//! not read stops the start before anything is moved: it is neither damaged nor an orphan.
//!
//! A store that starts with far fewer documents than its manifest says is open but not ready, until an operator
//! confirms the loss ([`Loss`]).
//!
//! Read `open.rs` first. `lock.rs`, `paths.rs`, `manifest.rs`, `quarantine.rs` and `disk_space.rs` are its parts.
//! `inspect.rs` opens a directory without writing to it.

mod disk_space;
mod inspect;
pub(crate) mod lock;
mod manifest;
mod open;
mod paths;
mod quarantine;
#[cfg(test)]
mod tests;

pub(crate) use disk_space::DiskSpace;
pub(crate) use inspect::inspect;
pub(crate) use lock::DirectoryLock;
pub(crate) use manifest::{Loss, Manifest};
pub(crate) use open::{OpenedDirectory, open};
pub(crate) use paths::disk_bytes;
pub(crate) use quarantine::{Cleared, clear_quarantines, count_quarantines};
