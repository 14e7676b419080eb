//! Groups of samples that clients do not name: the choices of one request, and requests with equal prompts that
//! arrive within a window. They share drafts as the samples of a named group do. Nothing else about them changes;
//! above all, they stay interactive.
//!
//! When the weights of the model change, a new group begins. Its samples and their lengths are those of the new
//! epoch.
//!
//! The first of some equal prompts is alone until the second one comes. So a prompt that comes once makes no group on
//! any worker, and the first sample joins the others with its next chunk.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;
use prometheus::IntGauge;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::{ApiError, NamespaceId};
use refrain_service_kit::random;

/// A namespace, and the hash of a prompt in it. Two prompts with one hash would share drafts, which changes no
/// output.
type PromptKey = (NamespaceId, PrefixHash);

/// The prompts of the last requests.
pub(crate) struct ImplicitGroups {
    /// Time from the first sample in which others join it; zero where only the choices of one request are a group.
    window: Duration,
    prompts: Mutex<LruCache<PromptKey, Arc<PromptGroup>>>,
    gauge: IntGauge,
}

/// The samples of one prompt.
pub(crate) struct PromptGroup {
    /// A random name, which no client can guess.
    name: String,
    began: Instant,
    /// How often the weights had changed when it began.
    epoch: u64,
    samples: AtomicU32,
}

impl PromptGroup {
    fn new(epoch: u64, now: Instant) -> Result<Self, ApiError> {
        Ok(PromptGroup {
            name: format!("implicit-{:032x}", random::u128()?),
            began: now,
            epoch,
            samples: AtomicU32::new(0),
        })
    }

    /// The name of the group, once it has several samples.
    pub(crate) fn name(&self) -> Option<&str> {
        (self.samples.load(Ordering::Relaxed) > 1).then_some(&*self.name)
    }
}

impl ImplicitGroups {
    /// Remembers at most `prompts_max` prompts, and shows their number in `gauge`.
    pub(crate) fn new(window: Duration, prompts_max: usize, gauge: IntGauge) -> Self {
        let prompts_max = NonZeroUsize::new(prompts_max).unwrap_or(NonZeroUsize::MIN);
        ImplicitGroups {
            window,
            prompts: Mutex::new(LruCache::new(prompts_max)),
            gauge,
        }
    }

    /// Joins the group of a prompt with a number of samples. `epoch` is how often the weights have changed.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn join(
        &self,
        namespace: NamespaceId,
        prompt: PrefixHash,
        samples: u32,
        epoch: u64,
        now: Instant,
    ) -> Result<Arc<PromptGroup>, ApiError> {
        let key = (namespace, prompt);
        let mut prompts = self.prompts.lock();
        let known = prompts.get(&key).filter(|group| {
            // The window does not move on: otherwise a prompt that comes every minute would be one endless group.
            let age = now.saturating_duration_since(group.began);
            age < self.window && group.epoch == epoch
        });
        let group = match known {
            Some(group) => group.clone(),
            None => {
                let group = Arc::new(PromptGroup::new(epoch, now)?);
                if !self.window.is_zero() {
                    prompts.put(key, group.clone());
                }
                group
            }
        };
        // Those at the end of the line may be old, and cost nothing but their place.
        while let Some((_, oldest)) = prompts.peek_lru()
            && now.saturating_duration_since(oldest.began) >= self.window
        {
            prompts.pop_lru();
        }
        self.gauge.set(prompts.len() as i64);
        group.samples.fetch_add(samples, Ordering::Relaxed);
        Ok(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);
    const ACME: NamespaceId = NamespaceId(1);

    fn groups(window: Duration, prompts_max: usize) -> ImplicitGroups {
        let gauge = IntGauge::new("prompts", "Prompts.").unwrap();
        ImplicitGroups::new(window, prompts_max, gauge)
    }

    #[test]
    fn equal_prompts_of_a_namespace_are_a_group_within_the_window() {
        let groups = groups(WINDOW, 10);
        let start = Instant::now();
        let join = |namespace, prompt, after_s| {
            let now = start + Duration::from_secs(after_s);
            groups
                .join(namespace, PrefixHash(prompt), 1, 0, now)
                .unwrap()
        };
        let first = join(ACME, 7, 0);
        assert_eq!(first.name(), None, "one sample is no group");
        let second = join(ACME, 7, 59);
        assert!(first.name().is_some());
        assert_eq!(first.name(), second.name());
        let (another_prompt, another_tenant) = (join(ACME, 8, 59), join(NamespaceId(2), 7, 59));
        assert_eq!((another_prompt.name(), another_tenant.name()), (None, None));
        // The window counts from the first sample.
        let late = join(ACME, 7, 60);
        assert_eq!(late.name(), None);
        assert_ne!(join(ACME, 7, 61).name(), first.name());
        // Groups older than the window are forgotten.
        assert_eq!(groups.gauge.get(), 3);
        join(ACME, 9, 300);
        assert_eq!(groups.gauge.get(), 1);
    }

    #[test]
    fn equal_prompts_of_two_epochs_are_two_groups() {
        let groups = groups(WINDOW, 10);
        let now = Instant::now();
        let join = |epoch| groups.join(ACME, PrefixHash(7), 2, epoch, now).unwrap();
        let (first, second) = (join(0), join(1));
        assert!(first.name().is_some() && second.name().is_some());
        assert_ne!(first.name(), second.name());
        assert_eq!(join(1).name(), second.name());
        assert_eq!(
            groups.gauge.get(),
            1,
            "the group of the older epoch is forgotten"
        );
    }

    #[test]
    fn the_choices_of_a_request_are_a_group_at_once_also_without_a_window() {
        for window in [WINDOW, Duration::ZERO] {
            let groups = groups(window, 10);
            let now = Instant::now();
            let wide = groups.join(ACME, PrefixHash(7), 4, 0, now).unwrap();
            assert!(wide.name().is_some());
            let other = groups.join(ACME, PrefixHash(7), 2, 0, now).unwrap();
            assert_eq!(wide.name() == other.name(), !window.is_zero());
        }
    }

    #[test]
    fn the_number_of_prompts_is_bounded() {
        let groups = groups(WINDOW, 2);
        let now = Instant::now();
        let join = |prompt| groups.join(ACME, PrefixHash(prompt), 1, 0, now).unwrap();
        for prompt in 0..100 {
            join(prompt);
            assert!(groups.gauge.get() <= 2);
        }
        assert_eq!(join(0).name(), None, "it was forgotten");
        assert!(join(99).name().is_some());
    }
}
