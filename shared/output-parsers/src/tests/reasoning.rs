//! reasoning
