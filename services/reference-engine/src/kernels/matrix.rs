//! Weight matrices, packed into panels, and their products with columns.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::panel_product::multiply;
use super::panels::{Columns, PANEL_ROWS, PanelElements, Panels};

/// A product of fewer multiply-adds than this runs on one thread, because starting a thread costs about 20 µs.
const THREAD_WORK_MIN: usize = 4 << 20;

/// Storage format of weights in memory. Both formats give the same bits.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// Four bytes per weight. A step over several tokens costs little more than a step over one, as on an
    /// accelerator, because reading the weights bounds both.
    #[default]
    F32,
    /// Two bytes per weight, in matrices that bf16 holds exactly; other matrices stay f32. This halves the memory.
    /// A step over one token is about twice as fast where caches bound it. A step over many is no faster.
    Bf16,
}

/// A matrix of `rows` x `depth`, cut into panels. Rows are padded with zeros to whole panels.
#[derive(Debug)]
pub(crate) struct Matrix {
    elements: PackedPanels,
    rows: usize,
    depth: usize,
}

#[derive(Debug)]
enum PackedPanels {
    F32(Vec<f32>),
    Bf16(Vec<u32>),
}

impl Matrix {
    /// Packs row-major parts into one matrix, stacked vertically, each `depth` wide. bf16 is used only if it holds
    /// every weight exactly.
    pub(crate) fn pack(parts: &[Vec<f32>], depth: usize, format: WeightFormat) -> Self {
        let rows: usize = parts.iter().map(|part| part.len() / depth).sum();
        let len = rows.next_multiple_of(PANEL_ROWS) * depth;
        let mut weights = parts.iter().flatten();
        let fits = weights.all(|weight| weight.to_bits() & 0xffff == 0);
        let mut elements = if format == WeightFormat::Bf16 && fits {
            PackedPanels::Bf16(Vec::with_capacity(len / 2))
        } else {
            PackedPanels::F32(Vec::with_capacity(len))
        };
        let mut all_rows = parts.iter().flat_map(|part| part.chunks_exact(depth));
        for _ in 0..len / (depth * PANEL_ROWS) {
            let mut panel = vec![0f32; depth * PANEL_ROWS];
            for (lane, row) in all_rows.by_ref().take(PANEL_ROWS).enumerate() {
                for (k, weight) in row.iter().enumerate() {
                    panel[k * PANEL_ROWS + lane] = *weight;
                }
            }
            match &mut elements {
                PackedPanels::F32(floats) => floats.extend(panel),
                PackedPanels::Bf16(words) => {
                    for k in panel.chunks_exact(PANEL_ROWS) {
                        let (low, high) = k.split_at(PANEL_ROWS / 2);
                        let pairs = low.iter().zip(high);
                        words.extend(pairs.map(|(low, high)| low.to_bits() >> 16 | high.to_bits()));
                    }
                }
            }
        }
        Matrix {
            elements,
            rows,
            depth,
        }
    }

    /// Returns the length of a product with one column, padding included.
    pub(crate) fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(PANEL_ROWS)
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.elements {
            PackedPanels::F32(floats) => floats.len() * 4,
            PackedPanels::Bf16(words) => words.len() * 4,
        }
    }

    /// Adds the shape and the elements to a hash.
    pub(crate) fn hash_into(&self, hash: &mut Xxh3) {
        hash.update(&(self.rows as u64).to_le_bytes());
        hash.update(&(self.depth as u64).to_le_bytes());
        match &self.elements {
            PackedPanels::F32(floats) => hash.update(bytemuck::cast_slice(floats)),
            PackedPanels::Bf16(words) => hash.update(bytemuck::cast_slice(words)),
        }
    }

    /// Multiplies with `count` columns, which lie one after the other, each `depth` long. `out` is resized, and its
    /// element `column * padded_rows + row` becomes the product of that row and column.
    pub(crate) fn product(
        &self,
        columns: &[f32],
        count: usize,
        out: &mut Vec<f32>,
        threads: usize,
    ) {
        let height = self.padded_rows();
        // Every element is overwritten below, so the old content does not matter.
        out.resize(count * height, 0.0);
        let columns = Columns {
            values: columns,
            stride: self.depth,
            count,
        };
        let panels = height / PANEL_ROWS;
        let threads = if self.rows * self.depth * count < THREAD_WORK_MIN {
            1
        } else {
            threads.min(panels)
        };
        if threads <= 1 {
            return multiply(self.panels(0, panels), columns, out, height, false);
        }
        // Rows are split, never sums, so the bits are those of one thread. Each thread writes to memory of its own,
        // because the threads' parts of one column interleave in `out`.
        let share = panels.div_ceil(threads);
        std::thread::scope(|scope| {
            let parts: Vec<_> = (0..panels)
                .step_by(share)
                .map(|first| {
                    let held = share.min(panels - first);
                    let work = move || {
                        let mut part = vec![0f32; count * held * PANEL_ROWS];
                        let panels = self.panels(first, held);
                        multiply(panels, columns, &mut part, held * PANEL_ROWS, false);
                        part
                    };
                    (first * PANEL_ROWS, held * PANEL_ROWS, scope.spawn(work))
                })
                .collect();
            for (start, width, part) in parts {
                // A panic of the kernel is a bug here, so it propagates to the caller.
                let part = part
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                for (column, part) in part.chunks_exact(width).enumerate() {
                    out[column * height + start..][..width].copy_from_slice(part);
                }
            }
        });
    }

    fn panels(&self, first: usize, count: usize) -> Panels<'_> {
        let (elements, stride) = match &self.elements {
            PackedPanels::F32(floats) => {
                let stride = self.depth * PANEL_ROWS;
                (PanelElements::F32(&floats[first * stride..]), stride)
            }
            PackedPanels::Bf16(words) => {
                let stride = self.depth * PANEL_ROWS / 2;
                (PanelElements::Bf16(&words[first * stride..]), stride)
            }
        };
        Panels {
            elements,
            stride,
            count,
            depth: self.depth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32)
            .map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 16) as f32 / 32768.0 - 1.0)
            .map(|value| f32::from_bits(value.to_bits() & 0xffff_0000))
            .collect()
    }

    #[test]
    fn formats_and_threads_give_the_same_bits() {
        let (rows, depth, count) = (1031, 128, 33);
        let parts = [random(31 * depth, 1), random((rows - 31) * depth, 2)];
        let columns = random(depth * count, 3);
        let product = |format, threads| {
            let mut out = vec![7.0; 5];
            Matrix::pack(&parts, depth, format).product(&columns, count, &mut out, threads);
            out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        let truth = product(WeightFormat::F32, 1);
        assert_eq!(truth, product(WeightFormat::Bf16, 1));
        assert_eq!(truth, product(WeightFormat::F32, 3));
        let row = 40;
        let weights = &parts[1][(row - 31) * depth..][..depth];
        let plain: f64 = weights
            .iter()
            .zip(&columns)
            .map(|(w, x)| f64::from(*w) * f64::from(*x))
            .sum();
        assert!((f64::from(f32::from_bits(truth[row])) - plain).abs() < 1e-4);
    }

    #[test]
    fn weights_that_bf16_cannot_hold_stay_whole() {
        let matrix = Matrix::pack(&[vec![1.000_000_1; 4]], 4, WeightFormat::Bf16);
        assert_eq!(matrix.bytes(), 4 * PANEL_ROWS * 4);
        assert_eq!(
            Matrix::pack(&[vec![1.0; 4]], 4, WeightFormat::Bf16).bytes(),
            2 * PANEL_ROWS * 4
        );
    }
}
