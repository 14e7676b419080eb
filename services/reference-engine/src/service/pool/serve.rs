//! Answers other engines that ask for blocks.

use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind, TenantId};
use tokio::sync::Semaphore;

use super::wire::{ANSWER_BYTES_MAX, BlocksRequest, encode_answer};
use crate::pool::{KvPool, encoded_len};

/// Maximum number of questions that are answered at once. Each takes memory for its answer.
const ANSWERS_MAX: usize = 8;

/// Delay after which an engine that was refused may ask again.
const RETRY_AFTER_MS: u64 = 50;

/// Answers questions for blocks.
pub(in crate::service) struct BlockServer {
    pool: Arc<KvPool>,
    places: Semaphore,
}

impl BlockServer {
    pub(in crate::service) fn new(pool: Arc<KvPool>) -> Self {
        BlockServer {
            pool,
            places: Semaphore::new(ANSWERS_MAX),
        }
    }

    /// Returns the answer to a question.
    ///
    /// # Errors
    /// `Overloaded` if too many others ask.
    pub(in crate::service) async fn answer(
        &self,
        request: &BlocksRequest,
    ) -> Result<Vec<u8>, ApiError> {
        let keys = request.keys()?;
        let Ok(_place) = self.places.try_acquire() else {
            self.pool.counts().refused_serves.add(1);
            let message = format!("{ANSWERS_MAX} engines are asking for blocks; try again later");
            let refused = ApiError::new(ErrorKind::Overloaded, message);
            return Err(refused
                .with_code("engine_kv_blocks")
                .with_retry_after_ms(RETRY_AFTER_MS));
        };
        let most = (ANSWER_BYTES_MAX / encoded_len(self.pool.block_floats())).max(1);
        let most = request.blocks_max.min(most);
        let pool = self.pool.clone();
        // Blocks are read from the file, which would hold up other calls.
        let answer = tokio::task::spawn_blocking(move || {
            let held = pool.held(&keys);
            let wanted = keys[..held].iter().take(most);
            let blocks: Vec<_> = wanted.map_while(|key| pool.block(*key)).collect();
            pool.counts().served.add(blocks.len() as u64);
            encode_answer(held, &blocks)
        });
        answer
            .await
            .map_err(|error| ApiError::internal(format!("KV blocks: {error}")))
    }

    /// Forgets the blocks of a tenant. Returns how many the memory and the file had.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(in crate::service) async fn forget(
        &self,
        tenant: TenantId,
    ) -> Result<(usize, usize), ApiError> {
        let pool = self.pool.clone();
        let forgotten = tokio::task::spawn_blocking(move || pool.forget(tenant)).await;
        let forgotten = forgotten.map_err(ApiError::internal)?;
        forgotten.map_err(|error| {
            let message = "blocks of the tenant in the file of the KV pool cannot be overwritten";
            ApiError::new(ErrorKind::Internal, message).with_detail(error)
        })
    }
}
