//! The methods of the table of sessions that use the pool.

use std::time::Instant;

use refrain_protocol::{ApiError, EngineSessionId, TokenId};

use super::super::pooling::loading;
use super::Sessions;
use crate::network::BLOCK_TOKENS;

impl Sessions {
    /// Hands in the blocks of an open session.
    pub(super) fn keep_blocks(&mut self, id: EngineSessionId) {
        if let (Some(pooling), Some(session)) = (&self.pooling, self.open.get_mut(&id)) {
            pooling.keep(session, true);
        }
    }

    /// Continues a session's KV with the blocks that the pool has. The last token of the text is never among them.
    /// Returns the number of tokens gained.
    ///
    /// `ahead` is text that the session will have later. With it, a new session waits for a load of its blocks.
    ///
    /// # Errors
    /// `Overloaded` while blocks are loaded. The session is unchanged.
    pub(crate) fn continue_from_pool(
        &mut self,
        id: EngineSessionId,
        ahead: Option<&[TokenId]>,
        now: Instant,
    ) -> Result<usize, ApiError> {
        let (Some(pooling), Some(session)) = (&self.pooling, self.open.get_mut(&id)) else {
            return Ok(0);
        };
        let Some(text) = session.pooled.as_mut().filter(|text| text.is_read) else {
            return Ok(0);
        };
        let usable = session.text.len().saturating_sub(1) / BLOCK_TOKENS;
        let from = session.kv.full_blocks();
        text.chain.extend(&session.text);
        let ids = &text.chain.ids()[..usable];
        if let Some(ahead) = ahead {
            let mut whole = text.chain.clone();
            let mut tokens = session.text.clone();
            tokens.extend_from_slice(ahead);
            whole.extend(&tokens);
            let ids = &whole.ids()[..tokens.len().saturating_sub(1) / BLOCK_TOKENS];
            let reach = from + pooling.pool.reach(ids, &tokens, from);
            let missing = ids.get(reach..).unwrap_or_default();
            if pooling.pool.awaits_load(missing, now) {
                return Err(loading());
            }
            pooling.pool.counts().misses.add(missing.len() as u64);
        }
        let reach = pooling.pool.reach(ids, &session.text, from);
        if reach == 0 {
            return Ok(0);
        }
        let blocks = pooling.pool.take(ids, &session.text, from, reach);
        let end = (from + blocks.len()) * BLOCK_TOKENS;
        let gained = end.saturating_sub(session.kv.len());
        if gained > 0 {
            session.kv.continue_with(from, blocks);
            text.kept = text.kept.max(session.kv.full_blocks());
        }
        Ok(gained)
    }
}
