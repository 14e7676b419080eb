//! refrain-service-kit
