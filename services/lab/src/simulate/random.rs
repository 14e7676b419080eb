//! Random numbers by seed, stream and position, so that a draw does not depend on how many were drawn elsewhere.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    seed: u64,
    stream: u64,
    drawn: u64,
}

impl Random {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Random {
            seed,
            stream,
            drawn: 0,
        }
    }

    /// From 0 to 1, 1 excluded.
    pub(crate) fn uniform(&mut self) -> f64 {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&self.stream.to_le_bytes());
        key[8..].copy_from_slice(&self.drawn.to_le_bytes());
        self.drawn += 1;
        (xxh3_64_with_seed(&key, self.seed) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From the normal distribution with mean 0 and variance 1 (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Shuffles (Fisher and Yates).
    pub(crate) fn shuffle<T>(&mut self, values: &mut [T]) {
        for at in (1..values.len()).rev() {
            let other = (self.uniform() * (at + 1) as f64) as usize;
            values.swap(at, other.min(at));
        }
    }
}
