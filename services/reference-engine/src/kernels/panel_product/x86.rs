//! The product kernel for x86-64: tiles of a few panels and a few columns, sums in registers.

/// Strides and depth of a tile's operands.
#[derive(Clone, Copy)]
struct Shape {
    panel_stride: usize,
    column_stride: usize,
    out_stride: usize,
    depth: usize,
    carry: bool,
}

/// Defines the kernel for one instruction set and one storage format of the weights.
///
/// The last argument gives, for each number of columns, the number of panels in a tile. A tile keeps enough sums
/// in flight to hide the latency of an FMA (4 cycles), and uses each weight for as many columns as registers allow.
macro_rules! tiles {
    ($feature:literal, $element:ty, $load:ident, $words:expr, $columns_max:literal, [$(($c:literal, $p:literal)),+]) => {
        use super::super::Shape;
        use crate::kernels::panels::{Columns, PANEL_ROWS, Panels};
        use super::{LANES, VECTORS, broadcast, fma, load, $load, store, zero};

        /// Multiplies `P` panels with `C` columns.
        ///
        /// # Safety
        /// The CPU must have the feature, and the pointers must be valid for everything that `shape` reaches.
        #[target_feature(enable = $feature)]
        unsafe fn tile<const P: usize, const C: usize>(
            panels: *const $element,
            columns: *const f32,
            out: *mut f32,
            shape: Shape,
        ) {
            let Shape { panel_stride, column_stride, out_stride, depth, carry } = shape;
            // SAFETY: the caller keeps this function's contract.
            unsafe {
                let mut sums = [[[zero(); VECTORS]; P]; C];
                if carry {
                    for c in 0..C {
                        for p in 0..P {
                            for v in 0..VECTORS {
                                sums[c][p][v] = load(out.add(c * out_stride + p * PANEL_ROWS + v * LANES));
                            }
                        }
                    }
                }
                // Wrapping arithmetic is not checked for overflow. In a debug build the checks would cost more than
                // the sums.
                for k in 0..depth {
                    let mut weights = [[zero(); VECTORS]; P];
                    for p in 0..P {
                        let at = p.wrapping_mul(panel_stride).wrapping_add(k.wrapping_mul($words));
                        weights[p] = $load(panels.wrapping_add(at));
                    }
                    for c in 0..C {
                        let at = c.wrapping_mul(column_stride).wrapping_add(k);
                        let x = broadcast(*columns.wrapping_add(at));
                        for p in 0..P {
                            for v in 0..VECTORS {
                                sums[c][p][v] = fma(weights[p][v], x, sums[c][p][v]);
                            }
                        }
                    }
                }
                for c in 0..C {
                    for p in 0..P {
                        for v in 0..VECTORS {
                            store(out.add(c * out_stride + p * PANEL_ROWS + v * LANES), sums[c][p][v]);
                        }
                    }
                }
            }
        }

        /// Multiplies all panels with all columns. It takes a few panels at a time, which stay in the nearest cache
        /// while all columns pass over them, so each weight is read from memory once.
        ///
        /// # Safety
        /// The CPU must have the feature, and the slices must be as long as the strides and counts imply.
        #[target_feature(enable = $feature)]
        pub(in crate::kernels::panel_product) unsafe fn run(
            held: *const $element,
            panels: Panels<'_>,
            columns: Columns<'_>,
            out: &mut [f32],
            out_stride: usize,
            carry: bool,
        ) {
            const PANELS_AT_ONCE: usize = 4;
            let shape = Shape {
                panel_stride: panels.stride,
                column_stride: columns.stride,
                out_stride,
                depth: panels.depth,
                carry,
            };
            let tiles = columns.count.div_ceil($columns_max);
            let width = columns.count.div_ceil(tiles);
            let out = out.as_mut_ptr();
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
                            let held = held.add(panel * panels.stride);
                            let x = columns.values.as_ptr().add(column * columns.stride);
                            let out = out.add(column * shape.out_stride + panel * PANEL_ROWS);
                            match count {
                                $($c => {
                                    if end - panel >= $p {
                                        tile::<$p, $c>(held, x, out, shape);
                                        panel += $p;
                                    } else {
                                        tile::<1, $c>(held, x, out, shape);
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
    };
}

pub(super) mod avx512 {
    use std::arch::x86_64::*;

    const LANES: usize = 16;
    const VECTORS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn broadcast(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fma(a: __m512, b: __m512, sum: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, sum)
    }

    /// # Safety
    /// The pointer must be valid for reading 16 floats.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller keeps this function's contract.
        unsafe { _mm512_loadu_ps(from) }
    }

    /// # Safety
    /// The pointer must be valid for writing 16 floats.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(to: *mut f32, value: __m512) {
        // SAFETY: the caller keeps this function's contract.
        unsafe { _mm512_storeu_ps(to, value) }
    }

    /// # Safety
    /// The pointer must be valid for reading 32 floats.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_f32(from: *const f32) -> [__m512; VECTORS] {
        // SAFETY: the caller keeps this function's contract.
        unsafe { [load(from), load(from.wrapping_add(LANES))] }
    }

    /// # Safety
    /// The pointer must be valid for reading 16 words.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_bf16(from: *const u32) -> [__m512; VECTORS] {
        // SAFETY: the caller keeps this function's contract.
        let words = unsafe { _mm512_loadu_si512(from.cast()) };
        let high = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)),
            _mm512_castsi512_ps(_mm512_and_si512(words, high)),
        ]
    }

    pub(in crate::kernels::panel_product) mod from_f32 {
        tiles!(
            "avx512f",
            f32,
            load_f32,
            PANEL_ROWS,
            12,
            [
                (1, 4),
                (2, 4),
                (3, 2),
                (4, 2),
                (5, 2),
                (6, 2),
                (7, 1),
                (8, 1),
                (9, 1),
                (10, 1),
                (11, 1),
                (12, 1)
            ]
        );
    }

    pub(in crate::kernels::panel_product) mod from_bf16 {
        tiles!(
            "avx512f",
            u32,
            load_bf16,
            PANEL_ROWS / 2,
            12,
            [
                (1, 4),
                (2, 4),
                (3, 2),
                (4, 2),
                (5, 2),
                (6, 2),
                (7, 1),
                (8, 1),
                (9, 1),
                (10, 1),
                (11, 1),
                (12, 1)
            ]
        );
    }
}

pub(super) mod avx2 {
    use std::arch::x86_64::*;

    const LANES: usize = 8;
    const VECTORS: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn zero() -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn broadcast(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn fma(a: __m256, b: __m256, sum: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, sum)
    }

    /// # Safety
    /// The pointer must be valid for reading 8 floats.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller keeps this function's contract.
        unsafe { _mm256_loadu_ps(from) }
    }

    /// # Safety
    /// The pointer must be valid for writing 8 floats.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn store(to: *mut f32, value: __m256) {
        // SAFETY: the caller keeps this function's contract.
        unsafe { _mm256_storeu_ps(to, value) }
    }

    /// # Safety
    /// The pointer must be valid for reading 32 floats.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load_f32(from: *const f32) -> [__m256; VECTORS] {
        // SAFETY: the caller keeps this function's contract.
        unsafe {
            [
                load(from),
                load(from.wrapping_add(LANES)),
                load(from.wrapping_add(2 * LANES)),
                load(from.wrapping_add(3 * LANES)),
            ]
        }
    }

    /// # Safety
    /// The pointer must be valid for reading 16 words.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load_bf16(from: *const u32) -> [__m256; VECTORS] {
        // SAFETY: the caller keeps this function's contract.
        let (first, second) = unsafe {
            (
                _mm256_loadu_si256(from.cast()),
                _mm256_loadu_si256(from.wrapping_add(LANES).cast()),
            )
        };
        let high = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(first)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(second)),
            _mm256_castsi256_ps(_mm256_and_si256(first, high)),
            _mm256_castsi256_ps(_mm256_and_si256(second, high)),
        ]
    }

    pub(in crate::kernels::panel_product) mod from_f32 {
        tiles!(
            "avx2,fma",
            f32,
            load_f32,
            PANEL_ROWS,
            3,
            [(1, 2), (2, 1), (3, 1)]
        );
    }

    pub(in crate::kernels::panel_product) mod from_bf16 {
        tiles!(
            "avx2,fma",
            u32,
            load_bf16,
            PANEL_ROWS / 2,
            3,
            [(1, 2), (2, 1), (3, 1)]
        );
    }
}
