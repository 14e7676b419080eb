//! Random numbers from the system, for ids, seeds and keys.
//!
//! If the system has none, that is an error and never a zero: two requests with the same id would share what must be
//! kept apart.

use std::cell::RefCell;

use refrain_protocol::ApiError;

/// Bytes that a thread gets from the system at once. A request needs several random numbers, and each call of the
/// system costs about as much as a hundred of these bytes.
const STOCK_BYTES: usize = 1_024;

/// Random bytes of a thread that nobody has used yet.
struct Stock {
    bytes: [u8; STOCK_BYTES],
    /// Number of bytes at the end that are left.
    left: usize,
}

thread_local! {
    static STOCK: RefCell<Stock> = const {
        RefCell::new(Stock {
            bytes: [0; STOCK_BYTES],
            left: 0,
        })
    };
}

impl Stock {
    /// Takes bytes, which are wiped here so that they cannot be handed out or read again.
    fn take(&mut self, into: &mut [u8]) -> Result<(), getrandom::Error> {
        if into.len() > self.left {
            if into.len() > STOCK_BYTES {
                return getrandom::fill(into);
            }
            self.left = 0;
            getrandom::fill(&mut self.bytes)?;
            self.left = STOCK_BYTES;
        }
        let start = STOCK_BYTES - self.left;
        let taken = &mut self.bytes[start..start + into.len()];
        into.copy_from_slice(taken);
        taken.fill(0);
        self.left -= into.len();
        Ok(())
    }
}

/// `N` random bytes.
///
/// # Errors
/// `Internal` if the system has no random numbers. The same holds for the functions below.
pub fn bytes<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0u8; N];
    // Without its stock, a thread that is ending asks the system.
    let taken = STOCK.try_with(|stock| stock.borrow_mut().take(&mut bytes));
    taken
        .unwrap_or_else(|_| getrandom::fill(&mut bytes))
        .map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    Ok(bytes)
}

/// 64 random bits.
pub fn u64() -> Result<u64, ApiError> {
    bytes().map(u64::from_le_bytes)
}

/// 128 random bits, which are enough for ids that no authority hands out.
pub fn u128() -> Result<u128, ApiError> {
    bytes().map(u128::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_comes_twice_on_any_thread() {
        let numbers = || (0..1_000).map(|_| u128().unwrap()).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(numbers)).collect();
        let all: Vec<u128> = threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect();
        let unique: HashSet<u128> = all.iter().copied().collect();
        assert_eq!((unique.len(), unique.contains(&0)), (all.len(), false));
    }

    #[test]
    fn any_length_is_filled_wherever_the_stock_ends() {
        for _ in 0..200 {
            assert_ne!(bytes::<7>().unwrap(), [0; 7]);
            assert_ne!(bytes::<100>().unwrap(), [0; 100]);
        }
        assert_ne!(bytes::<STOCK_BYTES>().unwrap(), [0; STOCK_BYTES]);
        let long = bytes::<{ STOCK_BYTES + 50 }>().unwrap();
        assert_ne!(long[STOCK_BYTES..], [0; 50]);
    }

    #[test]
    fn bytes_that_were_handed_out_are_wiped() {
        let given = bytes::<64>().unwrap();
        STOCK.with_borrow(|stock| {
            let used = &stock.bytes[..STOCK_BYTES - stock.left];
            assert!(used.iter().all(|byte| *byte == 0));
            assert!(!stock.bytes.windows(64).any(|window| window == given));
        });
    }
}
