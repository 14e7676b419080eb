//! refrain-scheduler
