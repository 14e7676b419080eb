//! refrain
