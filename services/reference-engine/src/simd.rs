//! The product kernel and run-time dispatch to it: the only unsafe code of this crate.
//!
//! A *panel* is [`PANEL_ROWS`] rows of a matrix, stored depth-major: for each k, the k-th element of every
//! row side by side. A vector register then holds one element of many rows, so a dot product lives in one
//! lane from its first term to its last: it starts at +0, and each k adds one fused multiply-add, in order
//! of k. Neither the width of the registers, nor how many columns or panels share a tile, nor cutting the
//! depth in two calls (`carry`) changes a single bit of it, and no horizontal sum is ever needed. That is
//! what lets one kernel serve one column and many alike.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

/// Rows of a panel.
pub(crate) const PANEL_ROWS: usize = 32;

/// Which instructions the machine has. Every variant gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// 512-bit registers, 32 of them.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit registers with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// What the compiler makes of plain loops (NEON on aarch64; slow where there is no FMA instruction).
    Plain,
}

impl Isa {
    /// The best of this machine, found once.
    pub(crate) fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::available()[0])
    }

    /// All that this machine can run, best first.
    pub(crate) fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                found.push(Isa::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(Isa::Avx2);
            }
        }
        found.push(Isa::Plain);
        found
    }
}

/// Elements of panels, by how they are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elements<'a> {
    /// 32 f32 per k.
    F32(&'a [f32]),
    /// 16 words per k; word j holds rows j (low half) and j + 16 (high half) as bf16.
    Bf16(&'a [u32]),
}

/// Panels that lie `stride` elements of the slice apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels<'a> {
    /// First panel at the beginning.
    pub(crate) elements: Elements<'a>,
    /// Slice elements from one panel to the next.
    pub(crate) stride: usize,
    /// How many panels.
    pub(crate) count: usize,
    /// How many k of each are used.
    pub(crate) depth: usize,
}

/// Column vectors that lie `stride` apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// First column at the beginning.
    pub(crate) values: &'a [f32],
    /// From one column to the next.
    pub(crate) stride: usize,
    /// How many columns.
    pub(crate) count: usize,
}

/// `out[c * out_stride + p * 32 + r] = sum over k of panel p, row r, element k times column c, element k`,
/// for every panel, row and column. With `carry` the sum goes on from what `out` holds.
///
/// # Panics
/// If a slice is too short for what its strides and counts say.
pub(crate) fn multiply(
    isa: Isa,
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
        Elements::F32(held) => (held.len(), PANEL_ROWS),
        Elements::Bf16(held) => (held.len(), PANEL_ROWS / 2),
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
    match (isa, panels.elements) {
        // SAFETY (these four): the assertions above bound every read and write of the kernels, and a variant
        // of `Isa` other than `Plain` is only ever made by `Isa::available`, after its features were found.
        // They are apart so that other architectures have no unsafe code at all.
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Elements::F32(held)) => unsafe {
            x86::avx512::from_f32::run(held.as_ptr(), panels, columns, out, out_stride, carry);
        },
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Elements::Bf16(held)) => unsafe {
            x86::avx512::from_bf16::run(held.as_ptr(), panels, columns, out, out_stride, carry);
        },
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Elements::F32(held)) => unsafe {
            x86::avx2::from_f32::run(held.as_ptr(), panels, columns, out, out_stride, carry);
        },
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, Elements::Bf16(held)) => unsafe {
            x86::avx2::from_bf16::run(held.as_ptr(), panels, columns, out, out_stride, carry);
        },
        (Isa::Plain, _) => plain(panels, columns, out, out_stride, carry),
    }
}

/// The same sums in plain Rust.
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
                Elements::F32(held) => {
                    let panel = &held[panel * panels.stride..][..panels.depth * PANEL_ROWS];
                    for (row, x) in panel.chunks_exact(PANEL_ROWS).zip(x) {
                        for (sum, w) in sums.iter_mut().zip(row) {
                            *sum = w.mul_add(*x, *sum);
                        }
                    }
                }
                Elements::Bf16(held) => {
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

/// A function of plain loops, compiled once per instruction set and chosen at run time. Rust neither fuses
/// nor reorders float operations, so every version gives the same bits; only the speed differs.
macro_rules! vectorised {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name($($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn plain($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn avx512($($arg: $type),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                match $crate::simd::Isa::detect() {
                    // SAFETY: `Isa::detect` found the feature on this CPU.
                    $crate::simd::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: `Isa::detect` found the feature on this CPU.
                    $crate::simd::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Isa::Plain => {}
                }
            }
            plain($($arg),*)
        }
    };
}
pub(crate) use vectorised;

#[cfg(test)]
mod tests {
    use super::*;

    /// Small deterministic values of both signs.
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
            (Elements::F32(&panels_f32), PANEL_ROWS),
            (Elements::Bf16(&panels_bf16), PANEL_ROWS / 2),
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
            for isa in Isa::available() {
                for columns in 1..=columns_max {
                    let mut out = vec![f32::NAN; columns * stride];
                    let x = Columns {
                        values: &x,
                        stride: depth,
                        count: columns,
                    };
                    multiply(isa, panels, x, &mut out, stride, false);
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
        for isa in Isa::available() {
            let mut whole = vec![0.0; PANEL_ROWS];
            let mut parts = vec![0.0; PANEL_ROWS];
            let panels = |from: usize, to: usize| Panels {
                elements: Elements::F32(&panel[from * PANEL_ROWS..]),
                stride: 0,
                count: 1,
                depth: to - from,
            };
            let column = |from: usize| Columns {
                values: &x[from..],
                stride: 0,
                count: 1,
            };
            multiply(
                isa,
                panels(0, depth),
                column(0),
                &mut whole,
                PANEL_ROWS,
                false,
            );
            multiply(isa, panels(0, 13), column(0), &mut parts, PANEL_ROWS, false);
            multiply(
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
