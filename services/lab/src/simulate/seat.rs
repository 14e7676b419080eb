//! A request on an instance, and the KV blocks that it takes.

/// Tokens of a KV block.
pub(super) const BLOCK_TOKENS: u64 = 16;
/// A request on an instance.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) job: usize,
    /// Tokens of prompt and output.
    pub(super) context: f64,
    /// Tokens of it that it has to read.
    pub(super) unread: u32,
    /// Tokens of it that lie in kept prefixes, which other requests may read as well.
    pub(super) shared: f64,
    /// Output tokens until the end of the chunk, and those so far.
    pub(super) left: f64,
    pub(super) emitted: f64,
    /// Steps of this chunk in which it emitted.
    pub(super) steps: f64,
    /// Output tokens of earlier chunks.
    pub(super) generated: u32,
    /// When its KV has arrived from the pool.
    pub(super) ready_s: f64,
    /// Context tokens that were read in this chunk.
    pub(super) read_tokens: u64,
}

impl Seat {
    /// Its own blocks after so many more tokens.
    pub(super) fn blocks_after(&self, tokens: f64) -> u64 {
        blocks(self.context - self.shared + tokens.min(self.left))
    }
}

/// Blocks of so many tokens.
pub(super) fn blocks(tokens: f64) -> u64 {
    (tokens.ceil() as u64).div_ceil(BLOCK_TOKENS)
}
