//! refrain-gateway
