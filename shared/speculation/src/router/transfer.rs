//! Decides whether a request is transferred to another worker, one whose EAGLE-3 head serves it better.
//!
//! A transfer costs a prefill of the whole text on the other worker. So it is made between chunks and once at most.
//! Suffix drafts must have failed the request for a while, and the expected output must be long enough to earn the
//! prefill back.

use super::{Asked, Route, Speeds};

/// Router decisions of a request that are looked back on. No `auto` request is transferred before it has as many.
const DECISIONS: u32 = u64::BITS;
/// Least share of them that found no suffix draft worth verifying.
const MISSES_SHARE_MIN: f32 = 0.75;
/// Least ratio of the seconds saved to the seconds of the prefill. It is above 1, since both are estimates.
const SAVING_RATIO_MIN: f64 = 1.5;

/// The router's last decisions for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentRoutes {
    /// One bit for each decision, the newest lowest; set where it was no suffix draft.
    misses: u64,
    decisions: u32,
}

impl RecentRoutes {
    /// Adds a decision.
    pub fn push(&mut self, route: Route) {
        self.misses = self.misses << 1 | u64::from(route != Route::Suffix);
        self.decisions = DECISIONS.min(self.decisions + 1);
    }

    /// Whether suffix drafts have failed the request for a while.
    fn has_failed(&self) -> bool {
        let misses_share = self.misses.count_ones() as f32 / DECISIONS as f32;
        self.decisions == DECISIONS && misses_share >= MISSES_SHARE_MIN
    }
}

/// The facts about a request that might be transferred.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidacy {
    /// The drafts that it asked for.
    pub asked: Asked,
    /// Another worker transferred it to this one, so it stays.
    pub transferred: bool,
    /// The fallback can be used on this worker.
    pub fallback_here: bool,
    /// The router's last decisions for it.
    pub recent: RecentRoutes,
    /// Tokens of the text that the other worker would have to read.
    pub context_tokens: u32,
    /// Output so far, in tokens.
    pub output_tokens: u32,
    /// Output that is still allowed, in tokens.
    pub remaining_tokens_max: u32,
    /// Tokens per second of the other worker with its head, divided by those without; `None` if it is not available.
    pub speedup: Option<f32>,
    /// The speeds of this worker.
    pub speeds: Speeds,
}

/// Whether to transfer the request now.
///
/// A request that asked for the fallback is transferred to a worker that has one, before its first decision; later it
/// stays. For other requests the remaining output is assumed to be as long as the output so far, within the limit.
/// Half of the texts that have reached a length go on for about as long again, and `max_tokens` is mostly far above
/// the emitted output. On those tokens 1 - 1 / speedup of the decoding time is saved, and the text's prefill is paid.
/// Both are computed with the speeds of this worker, since those of the other one are unknown; it serves the same
/// model.
pub fn should_transfer(of: &Candidacy) -> bool {
    let Some(speedup) = of.speedup.filter(|speedup| speedup.is_finite()) else {
        return false;
    };
    if of.transferred || of.fallback_here || of.remaining_tokens_max == 0 {
        return false;
    }
    match of.asked {
        Asked::Fallback => of.recent.decisions == 0,
        Asked::Suffix | Asked::Off => false,
        Asked::Auto => {
            let Speeds {
                prefill_tokens_s: Some(prefill_tokens_s),
                decode_tokens_s: Some(decode_tokens_s),
            } = of.speeds
            else {
                return false;
            };
            if !of.recent.has_failed() || speedup <= 1.0 {
                return false;
            }
            let expected = f64::from(of.output_tokens.min(of.remaining_tokens_max));
            let saved_s = expected / decode_tokens_s * (1.0 - 1.0 / f64::from(speedup));
            let prefill_s = f64::from(of.context_tokens) / prefill_tokens_s;
            saved_s > prefill_s * SAVING_RATIO_MIN
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer saves 200 / 100 * (1 - 1 / 2) = 1 s for a prefill of 300 / 1000 = 0.3 s.
    const GOOD: Candidacy = Candidacy {
        asked: Asked::Auto,
        transferred: false,
        fallback_here: false,
        recent: RecentRoutes {
            misses: !(u64::MAX << 48),
            decisions: 64,
        },
        context_tokens: 300,
        output_tokens: 200,
        remaining_tokens_max: 1000,
        speedup: Some(2.0),
        speeds: Speeds {
            prefill_tokens_s: Some(1000.0),
            decode_tokens_s: Some(100.0),
        },
    };

    #[test]
    fn every_condition_counts() {
        let stays = |why: &str, change: fn(&mut Candidacy)| {
            let mut of = GOOD;
            change(&mut of);
            assert!(!should_transfer(&of), "{why}");
        };
        assert!(should_transfer(&GOOD));
        stays("came from there", |of| of.transferred = true);
        stays("drafts here", |of| of.fallback_here = true);
        stays("too few decisions", |of| of.recent.decisions = 63);
        stays("suffix drafts do well", |of| of.recent.misses >>= 1);
        stays("nobody there", |of| of.speedup = None);
        stays("slower there", |of| of.speedup = Some(0.9));
        stays("no number", |of| of.speedup = Some(f32::NAN));
        stays("no speed at all", |of| of.speedup = Some(0.0));
        stays("the prefill costs more", |of| of.context_tokens = 1000);
        stays("little is left", |of| of.remaining_tokens_max = 50);
        stays("nothing is left", |of| of.remaining_tokens_max = 0);
        stays("little is expected", |of| of.output_tokens = 50);
        stays("prefill unknown", |of| of.speeds.prefill_tokens_s = None);
        stays("decoding unknown", |of| of.speeds.decode_tokens_s = None);
        stays("no drafts wanted", |of| of.asked = Asked::Off);
        stays("suffix drafts wanted", |of| of.asked = Asked::Suffix);
    }

    #[test]
    fn who_asks_for_the_fallback_goes_at_once_and_once() {
        let asks = Candidacy {
            asked: Asked::Fallback,
            recent: RecentRoutes::default(),
            output_tokens: 0,
            speedup: Some(1.01),
            speeds: Speeds::default(),
            ..GOOD
        };
        assert!(should_transfer(&asks));
        let back = Candidacy {
            transferred: true,
            ..asks
        };
        assert!(!should_transfer(&back));
        let here = Candidacy {
            fallback_here: true,
            ..asks
        };
        assert!(!should_transfer(&here));
    }

    #[test]
    fn the_window_forgets() {
        let mut recent = RecentRoutes::default();
        let mut push = |route, times| {
            for _ in 0..times {
                recent.push(route);
            }
            recent.has_failed()
        };
        assert!(!push(Route::Plain, 63));
        assert!(push(Route::Fallback, 1));
        assert!(push(Route::Suffix, 16));
        assert!(!push(Route::Suffix, 1));
        assert!(!push(Route::Merged, 47));
        assert!(push(Route::Plain, 1));
    }
}
