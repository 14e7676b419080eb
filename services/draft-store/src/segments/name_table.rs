//! A table of names: each name once, in order, stored as its difference from the name before it. Every sixteenth name
//! is stored completely, so that any name can be read by itself.
//!
//! ```text
//! count     8 bytes
//! blocks    a column: where each block of sixteen begins among the entries
//! len       8 bytes: length of the entries
//! entries   2 bytes: length shared with the name before; 2 bytes: length of the rest; the rest
//! ```

use std::collections::BTreeSet;

use crate::codec::Damage;
use crate::segments::packed_columns::{self, PackedColumn};

const BLOCK_NAMES: usize = 16;

/// Appends a table to `out`. The number of a name is its rank in the set.
///
/// # Errors
/// A name of more than 65,535 bytes.
pub(super) fn pack(out: &mut Vec<u8>, names: &BTreeSet<&str>) -> Result<(), Damage> {
    let (mut blocks, mut entries) = (Vec::new(), Vec::new());
    let mut before: &[u8] = &[];
    for (number, name) in names.iter().enumerate() {
        let name = name.as_bytes();
        let shared = if number % BLOCK_NAMES == 0 {
            blocks.push(entries.len() as u64);
            0
        } else {
            let same = before.iter().zip(name).take_while(|(a, b)| a == b);
            same.count()
        };
        for len in [shared, name.len() - shared] {
            let len = u16::try_from(len).map_err(|_| Damage::Length)?;
            entries.extend(len.to_le_bytes());
        }
        entries.extend(&name[shared..]);
        before = name;
    }
    out.extend((names.len() as u64).to_le_bytes());
    packed_columns::pack(out, blocks.iter().copied());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend(entries);
    Ok(())
}

/// The positions of a table in a byte slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct NameTable {
    count: usize,
    blocks: PackedColumn,
    from: usize,
    to: usize,
}

fn len_at(bytes: &[u8], at: usize) -> Result<usize, Damage> {
    let len = bytes.get(at..).and_then(|rest| rest.first_chunk());
    let len = u64::from_le_bytes(*len.ok_or(Damage::Short)?);
    usize::try_from(len).map_err(|_| Damage::Length)
}

impl NameTable {
    /// Opens the table that begins at `at`, and checks all of it.
    pub(super) fn open(bytes: &[u8], at: usize) -> Result<NameTable, Damage> {
        let count = len_at(bytes, at)?;
        let blocks = PackedColumn::open(bytes, at + 8, count.div_ceil(BLOCK_NAMES))?;
        let from = blocks.end() + 8;
        let len = len_at(bytes, blocks.end())?;
        let to = from.checked_add(len).ok_or(Damage::Length)?;
        // An entry takes at least four bytes, so a false count is found before anybody counts to it.
        if to > bytes.len() || count > len / 4 {
            return Err(Damage::Short);
        }
        let names = NameTable {
            count,
            blocks,
            from,
            to,
        };
        for number in 0..count {
            names.get(bytes, number)?;
        }
        Ok(names)
    }

    /// The position after the table.
    pub(super) fn end(&self) -> usize {
        self.to
    }

    /// Number of names.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// A name. `bytes` must be the slice that the table was opened in.
    pub(super) fn get(&self, bytes: &[u8], number: usize) -> Result<String, Damage> {
        if number >= self.count {
            return Err(Damage::Short);
        }
        let entries = bytes.get(self.from..self.to).ok_or(Damage::Short)?;
        let begins = self.blocks.get(bytes, number / BLOCK_NAMES)?;
        let begins = usize::try_from(begins).map_err(|_| Damage::Length)?;
        let mut rest = entries.get(begins..).ok_or(Damage::Short)?;
        let mut name: Vec<u8> = Vec::new();
        for _ in 0..=number % BLOCK_NAMES {
            let (lens, behind) = rest.split_first_chunk::<4>().ok_or(Damage::Short)?;
            let [shared, own] = [[lens[0], lens[1]], [lens[2], lens[3]]]
                .map(|len| usize::from(u16::from_le_bytes(len)));
            if shared > name.len() {
                return Err(Damage::Payload);
            }
            let (own, behind) = behind.split_at_checked(own).ok_or(Damage::Short)?;
            name.truncate(shared);
            name.extend(own);
            rest = behind;
        }
        String::from_utf8(name).map_err(|_| Damage::Payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_is_stored_as_its_difference_from_the_one_before() {
        let all: Vec<String> = (0..1_000)
            .map(|n| format!("a-long-project-name/{n:04}"))
            .collect();
        let mut bytes = Vec::new();
        pack(&mut bytes, &all.iter().map(String::as_str).collect()).unwrap();
        assert!(bytes.len() < 1_000 * 9, "{} bytes", bytes.len());
        let long = "n".repeat(1 << 16);
        assert_eq!(
            pack(&mut bytes, &BTreeSet::from([&long[..]])),
            Err(Damage::Length)
        );
    }

    proptest! {
        #[test]
        fn names_read_back_one_by_one(
            all in proptest::collection::btree_set("[ab\u{fc}\u{1f980}]{0,6}", 0..60),
            before in 0usize..5,
        ) {
            let mut bytes = vec![0xff; before];
            pack(&mut bytes, &all.iter().map(String::as_str).collect()).unwrap();
            let end = bytes.len();
            bytes.push(0xff);
            let names = NameTable::open(&bytes, before).unwrap();
            prop_assert_eq!((names.len(), names.end()), (all.len(), end));
            for (number, name) in all.iter().enumerate() {
                prop_assert_eq!(&names.get(&bytes, number).unwrap(), name);
            }
            prop_assert!(names.get(&bytes, all.len()).is_err());
        }

        #[test]
        fn damaged_tables_are_refused_or_read(
            all in proptest::collection::btree_set("[a-c]{0,5}", 0..40),
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = Vec::new();
            pack(&mut bytes, &all.iter().map(String::as_str).collect()).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = NameTable::open(&bytes, 0);
            bytes.truncate(at);
            let _ = NameTable::open(&bytes, 0);
        }
    }
}
