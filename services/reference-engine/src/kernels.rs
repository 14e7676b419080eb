//! The numeric kernels. All unsafe code of this crate is in this folder.

mod instruction_set;
mod matrix;
mod panel_product;
mod panels;
mod rope;
mod row_math;

pub(crate) use matrix::Matrix;
pub use matrix::WeightFormat;
pub(crate) use panel_product::multiply;
pub(crate) use panels::{Columns, PANEL_ROWS, PanelElements, Panels};
pub(crate) use rope::RopeTable;
pub(crate) use row_math::{
    add, exp_weights, peak, rms_norm, rotate, silu_product, softmax_weights,
};
