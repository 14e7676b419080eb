//! refrain-suffix-index
