//! Operands of the product kernel.
//!
//! A *panel* is [`PANEL_ROWS`] rows of a matrix, stored depth-major: for each k, the k-th elements of all rows lie
//! side by side. A vector register then holds one element of many rows, so each dot product stays in one lane.
//! It starts at +0, and each k adds one fused multiply-add, in order of k.
//!
//! No bit of a sum depends on the register width, on the number of columns or panels in a tile, or on a split of
//! the depth into two calls (`carry`). No horizontal sum is ever needed. So one kernel serves one column and many.

/// Rows of a panel.
pub(crate) const PANEL_ROWS: usize = 32;

/// The elements of panels, by storage format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PanelElements<'a> {
    /// 32 floats per k.
    F32(&'a [f32]),
    /// 16 words per k. Word j holds row j in its low half and row j + 16 in its high half, both as bf16.
    Bf16(&'a [u32]),
}

/// Several panels of equal size in one slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels<'a> {
    /// The first panel lies at the beginning.
    pub(crate) elements: PanelElements<'a>,
    /// Slice elements between the starts of two neighbouring panels.
    pub(crate) stride: usize,
    /// Number of panels.
    pub(crate) count: usize,
    /// Number of k that are used of each panel.
    pub(crate) depth: usize,
}

/// Several column vectors in one slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// The first column lies at the beginning.
    pub(crate) values: &'a [f32],
    /// Slice elements between the starts of two neighbouring columns.
    pub(crate) stride: usize,
    /// Number of columns.
    pub(crate) count: usize,
}
