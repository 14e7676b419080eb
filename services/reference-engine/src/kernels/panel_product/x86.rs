//! The product kernel for x86-64: tiles of a few panels and a few columns, sums in registers.

/// How far ahead weights are fetched into the second cache, in k of a panel. Panels of a matrix lie one after the
/// other, so this reaches into the next one. Without it, a tile of many columns waits for memory in between.
const FETCHED_AHEAD: usize = 64;

/// Words of a cache line.
const LINE_WORDS: usize = 16;

/// Strides and depth of a tile's operands.
#[derive(Clone, Copy)]
struct Shape {
    panel_stride: usize,
    column_stride: usize,
    out_stride: usize,
    depth: usize,
    carry: bool,
}

/// Defines the kernel for one instruction set, by the names of its instructions.
///
/// `tiles` gives, for each number of columns, the number of panels in a tile. A tile keeps enough sums in flight to
/// hide the latency of an FMA (4 cycles), and uses each weight for as many columns as registers allow.
macro_rules! kernel {
    (
        $name:ident: $feature:literal, $vector:ident of $lanes:literal,
        zero: $zero:ident, broadcast: $broadcast:ident, fma: $fma:ident, load: $load:ident, store: $store:ident,
        words: $load_words:ident, $broadcast_word:ident, $shift_left:ident, $and:ident, $as_floats:ident,
        tiles: [$(($c:literal, $p:literal)),+],
    ) => {
        pub(super) mod $name {
            use std::arch::x86_64::*;

            use super::{FETCHED_AHEAD, LINE_WORDS, Shape};
            use crate::kernels::panels::{Columns, PANEL_ROWS, PanelElements, Panels};

            const LANES: usize = $lanes;
            const VECTORS: usize = PANEL_ROWS / LANES;
            /// Maximum number of columns of a tile. The table of tiles has an entry for each number of columns.
            const COLUMNS_MAX: usize = [$($c),+].len();

            /// Loads the weights of a panel for one k.
            ///
            /// # Safety
            /// The pointer must be valid for reading 32 floats, or 16 words of two bf16 each.
            #[inline]
            #[target_feature(enable = $feature)]
            unsafe fn load_weights<const BF16: bool>(from: *const f32) -> [$vector; VECTORS] {
                let mut weights = [$zero(); VECTORS];
                if BF16 {
                    let high = $broadcast_word(0xffff_0000_u32.cast_signed());
                    for v in 0..VECTORS / 2 {
                        // SAFETY: the caller keeps this function's contract.
                        let words = unsafe { $load_words(from.wrapping_add(v * LANES).cast()) };
                        weights[v] = $as_floats($shift_left::<16>(words));
                        weights[VECTORS / 2 + v] = $as_floats($and(words, high));
                    }
                } else {
                    for v in 0..VECTORS {
                        // SAFETY: the caller keeps this function's contract.
                        weights[v] = unsafe { $load(from.wrapping_add(v * LANES)) };
                    }
                }
                weights
            }

            /// Multiplies `P` panels with `C` columns.
            ///
            /// # Safety
            /// The CPU must have the feature, and the pointers must be valid for everything that `shape` reaches.
            #[target_feature(enable = $feature)]
            unsafe fn tile<const BF16: bool, const P: usize, const C: usize>(
                panels: *const f32,
                columns: *const f32,
                out: *mut f32,
                shape: Shape,
            ) {
                let Shape { panel_stride, column_stride, out_stride, depth, carry } = shape;
                let words = if BF16 { PANEL_ROWS / 2 } else { PANEL_ROWS };
                // SAFETY: the caller keeps this function's contract.
                unsafe {
                    let mut sums = [[[$zero(); VECTORS]; P]; C];
                    if carry {
                        for c in 0..C {
                            for p in 0..P {
                                for v in 0..VECTORS {
                                    sums[c][p][v] = $load(out.add(c * out_stride + p * PANEL_ROWS + v * LANES));
                                }
                            }
                        }
                    }
                    // Wrapping arithmetic is not checked for overflow. In a debug build the checks would cost more
                    // than the sums.
                    for k in 0..depth {
                        let mut weights = [[$zero(); VECTORS]; P];
                        for p in 0..P {
                            let at = p.wrapping_mul(panel_stride).wrapping_add(k.wrapping_mul(words));
                            weights[p] = load_weights::<BF16>(panels.wrapping_add(at));
                            let ahead = panels.wrapping_add(at).wrapping_add(FETCHED_AHEAD * words);
                            for line in 0..words / LINE_WORDS {
                                // It may reach past the last panel: a fetch of any address is harmless.
                                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * LINE_WORDS).cast());
                            }
                        }
                        for c in 0..C {
                            let at = c.wrapping_mul(column_stride).wrapping_add(k);
                            let x = $broadcast(*columns.wrapping_add(at));
                            for p in 0..P {
                                for v in 0..VECTORS {
                                    sums[c][p][v] = $fma(weights[p][v], x, sums[c][p][v]);
                                }
                            }
                        }
                    }
                    for c in 0..C {
                        for p in 0..P {
                            for v in 0..VECTORS {
                                $store(out.add(c * out_stride + p * PANEL_ROWS + v * LANES), sums[c][p][v]);
                            }
                        }
                    }
                }
            }

            /// Multiplies all panels with all columns. It takes a few panels at a time, which stay in the nearest
            /// cache while all columns pass over them, so each weight is read from memory once.
            ///
            /// # Safety
            /// The CPU must have the feature, and the slices must be as long as the strides and counts imply.
            #[target_feature(enable = $feature)]
            unsafe fn tiles<const BF16: bool>(
                held: *const f32,
                panels: Panels<'_>,
                columns: Columns<'_>,
                out: *mut f32,
                shape: Shape,
            ) {
                const PANELS_AT_ONCE: usize = 4;
                let width = columns.count.div_ceil(columns.count.div_ceil(COLUMNS_MAX));
                let mut first = 0;
                while first < panels.count {
                    let end = panels.count.min(first + PANELS_AT_ONCE);
                    let mut column = 0;
                    while column < columns.count {
                        let count = width.min(columns.count - column);
                        let mut panel = first;
                        while panel < end {
                            // SAFETY: `panel` and `column` stay below their counts. The caller guarantees the rest.
                            unsafe {
                                let held = held.add(panel * shape.panel_stride);
                                let x = columns.values.as_ptr().add(column * shape.column_stride);
                                let out = out.add(column * shape.out_stride + panel * PANEL_ROWS);
                                match count {
                                    $($c => {
                                        if end - panel >= $p {
                                            tile::<BF16, $p, $c>(held, x, out, shape);
                                            panel += $p;
                                        } else {
                                            tile::<BF16, 1, $c>(held, x, out, shape);
                                            panel += 1;
                                        }
                                    })+
                                    _ => unreachable!("a tile never has more columns than the table of tiles"),
                                }
                            }
                        }
                        column += count;
                    }
                    first = end;
                }
            }

            /// Multiplies all panels with all columns.
            ///
            /// # Safety
            /// The CPU must have the feature, and the slices must be as long as the strides and counts imply.
            #[target_feature(enable = $feature)]
            pub(in crate::kernels::panel_product) unsafe fn run(
                panels: Panels<'_>,
                columns: Columns<'_>,
                out: &mut [f32],
                out_stride: usize,
                carry: bool,
            ) {
                let shape = Shape {
                    panel_stride: panels.stride,
                    column_stride: columns.stride,
                    out_stride,
                    depth: panels.depth,
                    carry,
                };
                let out = out.as_mut_ptr();
                // SAFETY: the caller keeps this function's contract.
                unsafe {
                    match panels.elements {
                        PanelElements::F32(held) => tiles::<false>(held.as_ptr(), panels, columns, out, shape),
                        PanelElements::Bf16(held) => {
                            tiles::<true>(held.as_ptr().cast(), panels, columns, out, shape);
                        }
                    }
                }
            }
        }
    };
}

kernel! {
    avx512: "avx512f", __m512 of 16,
    zero: _mm512_setzero_ps, broadcast: _mm512_set1_ps, fma: _mm512_fmadd_ps,
    load: _mm512_loadu_ps, store: _mm512_storeu_ps,
    words: _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_and_si512, _mm512_castsi512_ps,
    tiles: [
        (1, 4), (2, 4), (3, 2), (4, 2), (5, 2), (6, 2), (7, 1), (8, 1), (9, 1), (10, 1), (11, 1), (12, 1)
    ],
}

kernel! {
    avx2: "avx2,fma", __m256 of 8,
    zero: _mm256_setzero_ps, broadcast: _mm256_set1_ps, fma: _mm256_fmadd_ps,
    load: _mm256_loadu_ps, store: _mm256_storeu_ps,
    words: _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32, _mm256_and_si256, _mm256_castsi256_ps,
    tiles: [(1, 2), (2, 1), (3, 1)],
}
