//! refrain-clients
