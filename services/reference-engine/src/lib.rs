//! refrain-reference-engine
