//! Hints to the machine: prefetching, and huge pages.

/// Smallest memory for which huge pages are requested: the size of one on most machines.
pub(crate) const HUGE_FROM_BYTES: usize = 2 << 20;

/// Prefetches the element at an index, if there is one. Several prefetches wait for memory together, where several
/// reads would wait one after the other.
#[inline]
pub(crate) fn prefetch<T>(elements: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(element) = elements.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the instruction is a hint that never faults and changes nothing that the program sees. Every x86-64
        // processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(element).cast()) }
    }
    // On other machines, the program waits when it reads the element.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, at);
}

/// Reserves room in a list that is read at random, on huge pages once the list fills one.
///
/// A look-up reads some dozens of elements. With pages of 4 KiB, nearly every read misses the processor's TLB as
/// well, which costs about as much as the read itself.
pub(crate) fn reserve_huge<T>(list: &mut Vec<T>, more: usize) {
    if list.capacity() - list.len() < more {
        list.reserve(more);
        prefer_huge(list);
    }
}

/// Asks the system for huge pages under a list. If it refuses, everything still works, but more slowly.
#[cfg(target_os = "linux")]
fn prefer_huge<T>(list: &mut Vec<T>) {
    let bytes = list.capacity() * size_of::<T>();
    let start = list.as_mut_ptr().cast::<u8>();
    let before = start.align_offset(HUGE_FROM_BYTES);
    let whole = bytes.saturating_sub(before) / HUGE_FROM_BYTES * HUGE_FROM_BYTES;
    if whole > 0 {
        let first = start.wrapping_add(before);
        // SAFETY: these are whole pages inside the list's allocation. The hint changes their size, not their content.
        unsafe { libc::madvise(first.cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge<T>(_: &mut Vec<T>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_its_content_while_it_moves_to_huge_pages() {
        let mut list = Vec::new();
        for item in 0..3 * (HUGE_FROM_BYTES / size_of::<u64>()) {
            reserve_huge(&mut list, 1);
            assert!(list.capacity() > list.len());
            list.push(item as u64);
        }
        prefetch(&list, 0);
        prefetch(&list, list.len());
        assert!(list.iter().zip(0..).all(|(item, at)| *item == at));
        reserve_huge(&mut list, 1000);
        assert!(list.capacity() - list.len() >= 1000);
    }
}
