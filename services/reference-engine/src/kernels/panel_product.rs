//! The product of panels with columns: every matrix product, and the scores and sums of attention.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::instruction_set::InstructionSet;
use super::panels::{Columns, PANEL_ROWS, PanelElements, Panels};

/// Multiplies every panel with every column.
///
/// For panel p, row r and column c, `out[c * out_stride + p * 32 + r]` becomes the sum over k of the row's element k
/// times the column's element k. With `carry`, each sum continues from the value that `out` holds.
///
/// # Panics
/// Panics if a slice is too short for its strides and counts.
pub(crate) fn multiply(
    panels: Panels<'_>,
    columns: Columns<'_>,
    out: &mut [f32],
    out_stride: usize,
    carry: bool,
) {
    multiply_with(
        InstructionSet::detect(),
        panels,
        columns,
        out,
        out_stride,
        carry,
    );
}

/// Multiplies with the given instructions. All instruction sets give the same bits.
fn multiply_with(
    isa: InstructionSet,
    panels: Panels<'_>,
    columns: Columns<'_>,
    out: &mut [f32],
    out_stride: usize,
    carry: bool,
) {
    if panels.count == 0 || columns.count == 0 {
        return;
    }
    let (held, words) = match panels.elements {
        PanelElements::F32(held) => (held.len(), PANEL_ROWS),
        PanelElements::Bf16(held) => (held.len(), PANEL_ROWS / 2),
    };
    assert!(
        (panels.count - 1) * panels.stride + panels.depth * words <= held,
        "panels reach past their slice"
    );
    assert!(
        (columns.count - 1) * columns.stride + panels.depth <= columns.values.len(),
        "columns reach past their slice"
    );
    assert!(
        (columns.count - 1) * out_stride + panels.count * PANEL_ROWS <= out.len(),
        "products reach past their slice"
    );
    match isa {
        // SAFETY: the assertions above bound every read and write of the kernel. Only `InstructionSet::available`
        // makes this variant, after it detected the instructions.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe {
            x86::avx512::run(panels, columns, out, out_stride, carry);
        },
        // SAFETY: as for the other instruction set.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe {
            x86::avx2::run(panels, columns, out, out_stride, carry);
        },
        InstructionSet::Plain => plain(panels, columns, out, out_stride, carry),
    }
}

/// Computes the same sums as the vector kernels in plain Rust.
fn plain(
    panels: Panels<'_>,
    columns: Columns<'_>,
    out: &mut [f32],
    out_stride: usize,
    carry: bool,
) {
    for panel in 0..panels.count {
        for column in 0..columns.count {
            let x = &columns.values[column * columns.stride..][..panels.depth];
            let out = &mut out[column * out_stride + panel * PANEL_ROWS..][..PANEL_ROWS];
            let mut sums = [0.0f32; PANEL_ROWS];
            if carry {
                sums.copy_from_slice(out);
            }
            match panels.elements {
                PanelElements::F32(held) => {
                    let panel = &held[panel * panels.stride..][..panels.depth * PANEL_ROWS];
                    for (row, x) in panel.chunks_exact(PANEL_ROWS).zip(x) {
                        for (sum, w) in sums.iter_mut().zip(row) {
                            *sum = w.mul_add(*x, *sum);
                        }
                    }
                }
                PanelElements::Bf16(held) => {
                    let panel = &held[panel * panels.stride..][..panels.depth * PANEL_ROWS / 2];
                    let (low, high) = sums.split_at_mut(PANEL_ROWS / 2);
                    for (words, x) in panel.chunks_exact(PANEL_ROWS / 2).zip(x) {
                        for ((low, high), word) in low.iter_mut().zip(high.iter_mut()).zip(words) {
                            *low = f32::from_bits(word << 16).mul_add(*x, *low);
                            *high = f32::from_bits(word & 0xffff_0000).mul_add(*x, *high);
                        }
                    }
                }
            }
            out.copy_from_slice(&sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns small deterministic values of both signs.
    fn values(count: usize, seed: u32) -> Vec<f32> {
        (0..count as u32)
            .map(|i| {
                ((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 / 8_388_608.0) - 1.0
            })
            .collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn bits_depend_on_neither_instructions_nor_blocking() {
        let (count, depth, columns_max) = (7, 37, 27);
        let panels_f32 = values(count * depth * PANEL_ROWS, 1);
        let panels_bf16: Vec<u32> = values(count * depth * PANEL_ROWS / 2, 2)
            .iter()
            .map(|v| v.to_bits() | (v.to_bits() >> 16))
            .collect();
        let x = values(columns_max * depth, 3);
        for (elements, words) in [
            (PanelElements::F32(&panels_f32), PANEL_ROWS),
            (PanelElements::Bf16(&panels_bf16), PANEL_ROWS / 2),
        ] {
            let panels = Panels {
                elements,
                stride: depth * words,
                count,
                depth,
            };
            let stride = count * PANEL_ROWS;
            let mut truth = vec![0.0; columns_max * stride];
            plain(
                panels,
                Columns {
                    values: &x,
                    stride: depth,
                    count: columns_max,
                },
                &mut truth,
                stride,
                false,
            );
            for isa in InstructionSet::available() {
                for columns in 1..=columns_max {
                    let mut out = vec![f32::NAN; columns * stride];
                    let x = Columns {
                        values: &x,
                        stride: depth,
                        count: columns,
                    };
                    multiply_with(isa, panels, x, &mut out, stride, false);
                    assert_eq!(
                        bits(&out),
                        bits(&truth[..columns * stride]),
                        "{isa:?}, {columns} columns"
                    );
                }
            }
        }
    }

    #[test]
    fn carrying_on_is_the_same_as_one_call() {
        let depth = 40;
        let panel = values(depth * PANEL_ROWS, 5);
        let x = values(depth, 6);
        for isa in InstructionSet::available() {
            let mut whole = vec![0.0; PANEL_ROWS];
            let mut parts = vec![0.0; PANEL_ROWS];
            let panels = |from: usize, to: usize| Panels {
                elements: PanelElements::F32(&panel[from * PANEL_ROWS..]),
                stride: 0,
                count: 1,
                depth: to - from,
            };
            let column = |from: usize| Columns {
                values: &x[from..],
                stride: 0,
                count: 1,
            };
            multiply_with(
                isa,
                panels(0, depth),
                column(0),
                &mut whole,
                PANEL_ROWS,
                false,
            );
            multiply_with(isa, panels(0, 13), column(0), &mut parts, PANEL_ROWS, false);
            multiply_with(
                isa,
                panels(13, depth),
                column(13),
                &mut parts,
                PANEL_ROWS,
                true,
            );
            assert_eq!(bits(&whole), bits(&parts));
        }
    }
}
