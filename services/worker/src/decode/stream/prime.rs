//! Feeds the engine's own speculation: what the text is likely to go on with is put into the n-gram pool of a llama-server.
//!
//! The engine drafts and verifies by itself, so nothing here can change what is said. It is done beside the stream, which
//! waits for none of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use refrain_protocol::TokenId;
use refrain_speculation::{Expansion, ProposeParams};

use super::Chunks;
use crate::config::WorkerConfig;
use crate::router::drafts_from_memory;
use crate::running::Running;

/// What all chunks of a worker that primes share.
#[derive(Clone)]
pub(crate) struct SharedPriming {
    tenant: Arc<str>,
    context_tokens: usize,
    params: Arc<ProposeParams>,
}

impl SharedPriming {
    pub(crate) fn new(config: &WorkerConfig) -> Self {
        let most = config.engine.prime_tokens_max;
        SharedPriming {
            tenant: config.engine.prime_tenant.as_str().into(),
            context_tokens: config.engine.prime_context_tokens as usize,
            params: Arc::new(ProposeParams {
                expansion: Expansion::Linear,
                alpha: 0.0,
                offset: most as f32,
                max_spec_tokens: most as usize,
                ..config.speculation.params()
            }),
        }
    }
}

/// One chunk's part.
pub(super) struct Priming {
    shared: SharedPriming,
    /// What follows as long as the text goes on as the engine was last told.
    expected: VecDeque<TokenId>,
    /// Tokens since then.
    since: usize,
    in_flight: Arc<AtomicBool>,
}

impl Priming {
    /// `None` for requests that may not: of other tenants, or without drafts.
    pub(super) fn new(shared: &SharedPriming, running: &Running) -> Option<Self> {
        let is_tenants = running.request.namespace.namespace.tenant == *shared.tenant;
        let drafts = drafts_from_memory(running.request.speculation);
        (is_tenants && drafts).then(|| Priming {
            shared: shared.clone(),
            expected: VecDeque::new(),
            since: usize::MAX,
            in_flight: Arc::default(),
        })
    }

    /// The text went on.
    pub(super) fn heard(&mut self, tokens: &[TokenId]) {
        self.since = self.since.saturating_add(tokens.len());
        for token in tokens {
            if self.expected.pop_front() != Some(*token) {
                self.expected.clear();
            }
        }
    }

    /// Whether the engine may be told more: not while it knows, nor more often than its pool could make use of it.
    fn is_due(&self) -> bool {
        self.expected.is_empty()
            && self.since >= self.shared.context_tokens
            && !self.in_flight.load(Ordering::Relaxed)
    }
}

impl Chunks {
    /// Tells the engine how the text is likely to go on, if that is news to it.
    pub(super) fn prime(&self, running: &Running, priming: &mut Priming) {
        if !priming.is_due() {
            return;
        }
        let text = running.text();
        let Some(from) = text.len().checked_sub(priming.shared.context_tokens) else {
            return;
        };
        let Some((draft, _)) = running.found(&priming.shared.params, self.limits()) else {
            return;
        };
        priming.since = 0;
        priming.expected = draft.tree.tokens().collect();
        self.metrics
            .primed_tokens
            .inc_by(priming.expected.len() as u64);
        let tokens = text[from..]
            .iter()
            .chain(&priming.expected)
            .copied()
            .collect();
        let (engine, in_flight) = (self.engine.clone(), priming.in_flight.clone());
        in_flight.store(true, Ordering::Relaxed);
        tokio::spawn(async move {
            if let Err(error) = engine.prime(tokens).await {
                // Its words are not logged: they may repeat the text.
                tracing::debug!(kind = ?error.kind, code = error.code, "the engine was not primed");
            }
            in_flight.store(false, Ordering::Relaxed);
        });
    }
}
