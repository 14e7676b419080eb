//! Support that the tests of several modules share, and the committed files of every format on disk.

pub(crate) mod format_fixtures;
pub(crate) mod test_store;
