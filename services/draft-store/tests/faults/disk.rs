//! A disk that fails at a chosen moment.
//!
//! This program defines its own `pwrite64`, `fsync` and others. They replace those of the system library, since a
//! program's own symbols come first. They pass on every call that they are not told to refuse.
//!
//! A power cut loses what was written and not synced, so old bytes are kept until their file is synced.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};

/// The fault at the chosen moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The disk is full from then on. Removing files still works.
    Full,
    /// One call fails.
    ErrorOnce,
    /// Every call fails from then on.
    Error,
    /// Every call fails from then on, and everything that was not synced is lost.
    PowerCut,
    /// Every call fails from then on, and every other write that was not synced is lost.
    PowerCutInPart,
}

/// A write that may be lost.
struct Unsynced {
    inode: u64,
    old_len: u64,
    at: u64,
    old: Vec<u8>,
}

struct Disk {
    dir: PathBuf,
    fault: Fault,
    /// Calls until the fault happens.
    left: u64,
    calls: u64,
    has_failed: bool,
    unsynced: Vec<Unsynced>,
}

static DISK: Mutex<Option<Disk>> = Mutex::new(None);

fn disk() -> MutexGuard<'static, Option<Disk>> {
    DISK.lock()
}

/// Makes the disk under `dir` fail at the call after `calls` others.
pub(crate) fn arm(dir: &Path, fault: Fault, calls: u64) {
    *disk() = Some(Disk {
        dir: dir.to_owned(),
        fault,
        left: calls,
        calls: 0,
        has_failed: false,
        unsynced: Vec::new(),
    });
}

/// Repairs the disk. Returns how many calls there were, and whether one of them failed.
pub(crate) fn disarm() -> (u64, bool) {
    let Some(disk) = disk().take() else {
        return (0, false);
    };
    if disk.has_failed && matches!(disk.fault, Fault::PowerCut | Fault::PowerCutInPart) {
        lose(&disk);
    }
    (disk.calls, disk.has_failed)
}

/// Undoes what was not synced, the latest first.
fn lose(disk: &Disk) {
    for (number, write) in disk.unsynced.iter().enumerate().rev() {
        if disk.fault == Fault::PowerCutInPart && number % 2 == 0 {
            continue;
        }
        let Some(path) = with_inode(&disk.dir, write.inode) else {
            continue;
        };
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&write.old, write.at).unwrap();
        file.set_len(write.old_len).unwrap();
    }
}

fn with_inode(dir: &Path, inode: u64) -> Option<PathBuf> {
    for entry in std::fs::read_dir(dir).ok()? {
        let entry = entry.ok()?;
        let found = match entry.file_type().ok()?.is_dir() {
            true => with_inode(&entry.path(), inode),
            false => (entry.metadata().ok()?.ino() == inode).then(|| entry.path()),
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

fn path_of(fd: RawFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()
}

/// Whether a call is to fail, and how. A full disk refuses calls with `grows`.
fn refuses(disk: &mut Disk, grows: bool) -> Option<c_int> {
    disk.calls += 1;
    let is_due = disk.left == 0;
    disk.left = disk.left.saturating_sub(1);
    let fails = match disk.fault {
        Fault::Full => is_due && grows,
        Fault::ErrorOnce => is_due && !disk.has_failed,
        Fault::Error | Fault::PowerCut | Fault::PowerCutInPart => is_due,
    };
    disk.has_failed |= fails;
    fails.then_some(match disk.fault {
        Fault::Full => libc::ENOSPC,
        _ => libc::EIO,
    })
}

/// The error for a call on a file. `None` if it is not on the failing disk, or is not to fail.
fn on_file(fd: RawFd, grows: bool, note: impl FnOnce(&mut Disk)) -> Option<c_int> {
    if fd <= 2 {
        return None;
    }
    let mut slot = disk();
    let disk = slot.as_mut()?;
    let path = path_of(fd)?;
    if !path.starts_with(&disk.dir) {
        return None;
    }
    let refused = refuses(disk, grows);
    if refused.is_none() {
        note(disk);
    }
    refused
}

fn on_path(path: *const c_char, grows: bool) -> Option<c_int> {
    let mut slot = disk();
    let disk = slot.as_mut()?;
    // SAFETY: callers of the system library pass a string that ends with 0.
    let path = unsafe { CStr::from_ptr(path) };
    let is_there = Path::new(path.to_str().ok()?).starts_with(&disk.dir);
    if is_there { refuses(disk, grows) } else { None }
}

fn keep_old(disk: &mut Disk, fd: RawFd, at: u64, count: u64) {
    let path = format!("/proc/self/fd/{fd}");
    let Ok(metadata) = std::fs::metadata(&path) else {
        return;
    };
    let mut old = vec![0; metadata.len().saturating_sub(at).min(count) as usize];
    if let Ok(file) = std::fs::File::open(&path) {
        let _ = file.read_exact_at(&mut old, at);
    }
    disk.unsynced.push(Unsynced {
        inode: metadata.ino(),
        old_len: metadata.len(),
        at,
        old,
    });
}

fn failed(errno: c_int) -> c_int {
    // SAFETY: the place of this thread's error number.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Returns its argument. Every function here ends with this call.
fn passed_on(result: libc::c_long) -> libc::c_long {
    result
}

#[unsafe(no_mangle)]
extern "C" fn pwrite64(fd: c_int, bytes: *const c_void, count: usize, at: i64) -> isize {
    let at_byte = at.unsigned_abs();
    if let Some(errno) = on_file(fd, true, |disk| keep_old(disk, fd, at_byte, count as u64)) {
        return failed(errno) as isize;
    }
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_pwrite64, fd, bytes, count, at) }) as isize
}

#[unsafe(no_mangle)]
extern "C" fn write(fd: c_int, bytes: *const c_void, count: usize) -> isize {
    let note = |disk: &mut Disk| {
        // SAFETY: reads the position in a file, and changes nothing.
        let at = unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) };
        keep_old(disk, fd, at.unsigned_abs(), count as u64);
    };
    if let Some(errno) = on_file(fd, true, note) {
        return failed(errno) as isize;
    }
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_write, fd, bytes, count) }) as isize
}

#[unsafe(no_mangle)]
extern "C" fn ftruncate64(fd: c_int, len: i64) -> c_int {
    let note = |disk: &mut Disk| keep_old(disk, fd, len.unsigned_abs(), u64::MAX);
    if let Some(errno) = on_file(fd, false, note) {
        return failed(errno);
    }
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_ftruncate, fd, len) }) as c_int
}

fn sync(fd: c_int, call: libc::c_long) -> c_int {
    let inode = std::fs::metadata(format!("/proc/self/fd/{fd}")).map(|metadata| metadata.ino());
    let note = |disk: &mut Disk| {
        if let Ok(inode) = inode {
            disk.unsynced.retain(|write| write.inode != inode);
        }
    };
    if let Some(errno) = on_file(fd, true, note) {
        return failed(errno);
    }
    // SAFETY: the caller's own argument.
    passed_on(unsafe { libc::syscall(call, fd) }) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn fsync(fd: c_int) -> c_int {
    sync(fd, libc::SYS_fsync)
}

#[unsafe(no_mangle)]
extern "C" fn fdatasync(fd: c_int) -> c_int {
    sync(fd, libc::SYS_fdatasync)
}

/// It makes nothing durable: it neither waits for the drive nor writes lengths.
#[unsafe(no_mangle)]
extern "C" fn sync_file_range(fd: c_int, from: i64, count: i64, flags: u32) -> c_int {
    if let Some(errno) = on_file(fd, true, |_| {}) {
        return failed(errno);
    }
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_sync_file_range, fd, from, count, flags) }) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    if let Some(errno) = on_path(from, true) {
        return failed(errno);
    }
    let (here, flags) = (libc::AT_FDCWD, 0);
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_renameat2, here, from, here, to, flags) }) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn unlink(path: *const c_char) -> c_int {
    if let Some(errno) = on_path(path, false) {
        return failed(errno);
    }
    // SAFETY: the caller's own argument.
    passed_on(unsafe { libc::syscall(libc::SYS_unlinkat, libc::AT_FDCWD, path, 0) }) as c_int
}

#[unsafe(no_mangle)]
extern "C" fn mkdir(path: *const c_char, mode: u32) -> c_int {
    if let Some(errno) = on_path(path, true) {
        return failed(errno);
    }
    // SAFETY: the caller's own arguments.
    passed_on(unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, path, mode) }) as c_int
}
