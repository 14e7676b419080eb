//! refrain-worker
