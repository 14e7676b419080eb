//! Packed numbers of many documents. A column holds one number per document, less the smallest of them, in as many
//! bits as the widest difference needs.
//!
//! ```text
//! least   8 bytes: the smallest number
//! width   1 byte, 0 to 64: bits per number
//! bits    the differences, lowest bits first, padded to a whole byte
//! ```

use crate::codec::Damage;

const HEADER_BYTES: usize = 9;

/// Appends a column to `out`.
pub(super) fn pack(out: &mut Vec<u8>, numbers: impl Iterator<Item = u64> + Clone) {
    let least = numbers.clone().min().unwrap_or_default();
    let most = numbers.clone().max().unwrap_or_default();
    let width = u64::BITS - (most - least).leading_zeros();
    out.extend(least.to_le_bytes());
    out.push(width as u8);
    let (mut waiting, mut bits) = (0u128, 0);
    for number in numbers {
        waiting |= u128::from(number - least) << bits;
        bits += width;
        while bits >= 8 {
            out.push(waiting as u8);
            waiting >>= 8;
            bits -= 8;
        }
    }
    if bits > 0 {
        out.push(waiting as u8);
    }
}

/// The position of a column in a byte slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedColumn {
    least: u64,
    width: usize,
    len: usize,
    from: usize,
    to: usize,
}

impl PackedColumn {
    /// Opens the column of `len` numbers that begins at `at`.
    pub(super) fn open(bytes: &[u8], at: usize, len: usize) -> Result<PackedColumn, Damage> {
        let header = bytes.get(at..).and_then(|rest| rest.get(..HEADER_BYTES));
        let (least, width) = header.ok_or(Damage::Short)?.split_at(8);
        let least = u64::from_le_bytes(least.try_into().map_err(|_| Damage::Short)?);
        let width = usize::from(width[0]);
        if width > 64 {
            return Err(Damage::Payload);
        }
        let from = at + HEADER_BYTES;
        let bits = len.checked_mul(width).ok_or(Damage::Length)?;
        let to = from.checked_add(bits.div_ceil(8)).ok_or(Damage::Length)?;
        if to > bytes.len() {
            return Err(Damage::Short);
        }
        Ok(PackedColumn {
            least,
            width,
            len,
            from,
            to,
        })
    }

    /// The position after the column.
    pub(super) fn end(&self) -> usize {
        self.to
    }

    /// A number of the column. `bytes` must be the slice that the column was opened in.
    pub(super) fn get(&self, bytes: &[u8], at: usize) -> Result<u64, Damage> {
        if at >= self.len {
            return Err(Damage::Short);
        }
        let bit = at * self.width;
        let from = self.from + bit / 8;
        // A number of 64 bits that begins within a byte reaches into nine bytes.
        let to = self.to.min(from + 9);
        let found = bytes.get(from..to).ok_or(Damage::Short)?;
        let mut word = [0; 16];
        word[..found.len()].copy_from_slice(found);
        let above = u128::from_le_bytes(word) >> (bit % 8) & ((1 << self.width) - 1);
        self.least.checked_add(above as u64).ok_or(Damage::Payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8], at: usize, len: usize) -> Result<(Vec<u64>, usize), Damage> {
        let column = PackedColumn::open(bytes, at, len)?;
        let numbers = (0..len).map(|number| column.get(bytes, number));
        Ok((numbers.collect::<Result<_, _>>()?, column.end()))
    }

    #[test]
    fn equal_numbers_take_no_space() {
        let mut bytes = Vec::new();
        pack(&mut bytes, [u64::MAX; 1_000].into_iter());
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(
            read(&bytes, 0, 1_000).unwrap(),
            (vec![u64::MAX; 1_000], HEADER_BYTES)
        );
    }

    proptest! {
        #[test]
        fn numbers_of_any_width_read_back(
            numbers in proptest::collection::vec(any::<u64>(), 0..70),
            width in 0u32..=64,
            least in any::<u64>(),
            before in 0usize..5,
        ) {
            let narrow = |number: u64| number.checked_shr(64 - width).unwrap_or(0);
            let numbers: Vec<u64> = numbers.into_iter().map(|number| narrow(number).saturating_add(least)).collect();
            let mut bytes = vec![0xff; before];
            pack(&mut bytes, numbers.iter().copied());
            let end = bytes.len();
            prop_assert!(end <= before + HEADER_BYTES + (numbers.len() * width as usize).div_ceil(8));
            bytes.push(0xff);
            prop_assert_eq!(read(&bytes, before, numbers.len()).unwrap(), (numbers, end));
        }

        #[test]
        fn any_bytes_are_refused_or_read(
            bytes in proptest::collection::vec(any::<u8>(), 0..60),
            len in any::<usize>(),
        ) {
            if let Ok(column) = PackedColumn::open(&bytes, 0, len) {
                prop_assert!(column.end() <= bytes.len());
                let _ = (column.get(&bytes, 0), column.get(&bytes, len.wrapping_sub(1)), column.get(&bytes, len));
            }
        }
    }
}
