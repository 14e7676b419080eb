//! detection
