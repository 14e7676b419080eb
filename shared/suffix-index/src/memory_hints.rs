//! What a search asks of the machine: places that come before they are read, and pages that are found at once.

/// From this size on memory is asked for on huge pages: the size of one on most machines.
pub(crate) const HUGE_FROM_BYTES: usize = 2 << 20;

/// Asks for a place, if there is one of that number, and does not wait for it. Who asks for several waits for one of them
/// and not for each.
#[inline]
pub(crate) fn fetch<T>(places: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = places.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that changes nothing the program sees and faults nowhere. Every x86-64 processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) }
    }
    // Elsewhere a place is waited for when it is read.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (places, at);
}

/// Makes room in a list that is read all over, on huge pages once it fills one.
///
/// A look-up reads some dozens of places of it. With pages of 4 KiB nearly every one misses the processor's table of
/// pages as well, which costs about as much as the look itself.
pub(crate) fn make_room<T>(list: &mut Vec<T>, more: usize) {
    if list.capacity() - list.len() < more {
        list.reserve(more);
        prefer_huge(list);
    }
}

/// Asks the system for huge pages under a list. A wish: where it is refused everything works, more slowly.
#[cfg(target_os = "linux")]
fn prefer_huge<T>(list: &mut Vec<T>) {
    let bytes = list.capacity() * size_of::<T>();
    let start = list.as_mut_ptr().cast::<u8>();
    let before = start.align_offset(HUGE_FROM_BYTES);
    let whole = bytes.saturating_sub(before) / HUGE_FROM_BYTES * HUGE_FROM_BYTES;
    if whole > 0 {
        let first = start.wrapping_add(before);
        // SAFETY: whole pages inside of what the list has allocated. The hint changes their size and nothing that is read.
        unsafe { libc::madvise(first.cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge<T>(_: &mut Vec<T>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_what_it_holds_while_it_moves_to_huge_pages() {
        let mut list = Vec::new();
        for item in 0..3 * (HUGE_FROM_BYTES / size_of::<u64>()) {
            make_room(&mut list, 1);
            assert!(list.capacity() > list.len());
            list.push(item as u64);
        }
        fetch(&list, 0);
        fetch(&list, list.len());
        assert!(list.iter().zip(0..).all(|(item, at)| *item == at));
        make_room(&mut list, 1000);
        assert!(list.capacity() - list.len() >= 1000);
    }
}
