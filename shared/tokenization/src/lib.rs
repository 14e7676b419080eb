//! refrain-tokenization
