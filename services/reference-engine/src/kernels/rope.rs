//! Rotary position embeddings.

/// Cosines and sines of positions. Rows are computed as longer texts need them.
#[derive(Debug)]
pub(crate) struct RopeTable {
    /// Radians per position of each pair, `head_dim / 2` of them.
    frequencies: Vec<f32>,
    /// Layout: `[position][cosines of all pairs, sines of all pairs]`.
    rows: Vec<f32>,
}

impl RopeTable {
    /// Creates an empty table.
    pub(crate) fn new(frequencies: Vec<f32>) -> Self {
        RopeTable {
            frequencies,
            rows: Vec::new(),
        }
    }

    /// Computes the rows of all positions below `positions`.
    pub(crate) fn reach(&mut self, positions: usize) {
        let width = 2 * self.frequencies.len();
        for position in self.rows.len() / width..positions {
            // The angle is rounded to f32 before cos and sin, because the training code does so.
            let angles: Vec<f64> = self
                .frequencies
                .iter()
                .map(|frequency| f64::from(position as f32 * frequency))
                .collect();
            self.rows
                .extend(angles.iter().map(|angle| angle.cos() as f32));
            self.rows
                .extend(angles.iter().map(|angle| angle.sin() as f32));
        }
    }

    /// Returns the cosines and sines of a position that [`RopeTable::reach`] has covered.
    pub(crate) fn row(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        self.rows[position * 2 * half..][..2 * half].split_at(half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::row_math::rotate;

    #[test]
    fn rotation_keeps_length_and_position_zero_is_identity() {
        let mut table = RopeTable::new(vec![1.0, 0.01]);
        table.reach(9);
        let head = [1.0, 2.0, 3.0, 4.0];
        let mut turned = head;
        let (cos, sin) = table.row(0);
        rotate(&mut turned, cos, sin);
        assert_eq!(turned, head);
        let (cos, sin) = table.row(8);
        rotate(&mut turned, cos, sin);
        let length = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>();
        assert!((length(&turned) - length(&head)).abs() < 1e-4);
        assert_ne!(turned, head);
    }
}
