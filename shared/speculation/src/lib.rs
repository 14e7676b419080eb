//! refrain-speculation
