//! refrain-draft-store
