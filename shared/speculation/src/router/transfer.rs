//! Decides whether a request is transferred to another worker, one whose EAGLE-3 head serves it better.
//!
//! A transfer costs a prefill of the whole text on the other worker. So it is made between chunks and once at most.
//! Suffix drafts must have failed the request for a while, and the expected output must be long enough to earn the
//! prefill back.

use std::collections::VecDeque;

use super::{Asked, Route};

/// The conditions under which requests are transferred.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferParams {
    /// Number of recent router decisions that are considered. No `auto` request is transferred before it has as many.
    pub after_steps: usize,
    /// Least share of them that found no suffix draft worth verifying.
    pub misses_share_min: f32,
    /// Least ratio of the seconds saved to the seconds of the prefill. It is above 1, since both are estimates.
    pub saving_ratio_min: f64,
}

impl Default for TransferParams {
    fn default() -> Self {
        TransferParams {
            after_steps: 64,
            misses_share_min: 0.75,
            saving_ratio_min: 1.5,
        }
    }
}

/// The router's last decisions for one request.
#[derive(Clone, Debug, Default)]
pub struct RecentRoutes {
    misses: VecDeque<bool>,
    missed: usize,
}

impl RecentRoutes {
    /// Adds a decision, and forgets all but the `window` newest ones.
    pub fn push(&mut self, route: Route, window: usize) {
        let miss = route != Route::Suffix;
        self.misses.push_back(miss);
        self.missed += usize::from(miss);
        while self.misses.len() > window {
            self.missed -= usize::from(self.misses.pop_front() == Some(true));
        }
    }

    /// Number of decisions that are held.
    pub fn len(&self) -> usize {
        self.misses.len()
    }

    /// Whether no decision is held.
    pub fn is_empty(&self) -> bool {
        self.misses.is_empty()
    }

    /// Share of the decisions that were not suffix drafts; 0 without decisions.
    pub fn misses_share(&self) -> f32 {
        self.missed as f32 / self.misses.len().max(1) as f32
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
    /// Number of decisions that [`RecentRoutes`] holds.
    pub decisions: usize,
    /// See [`RecentRoutes::misses_share`].
    pub misses_share: f32,
    /// Tokens of the text that the other worker would have to read.
    pub context_tokens: u32,
    /// Output so far, in tokens.
    pub output_tokens: u32,
    /// Output that is still allowed, in tokens.
    pub remaining_tokens_max: u32,
    /// Tokens per second of the other worker with its head, divided by those without; `None` if it is not available.
    pub speedup: Option<f32>,
    /// Tokens per second of prefills, measured on this worker.
    pub prefill_tokens_s: Option<f64>,
    /// Tokens per second of one request that decodes without drafts, measured on this worker.
    pub decode_tokens_s: Option<f64>,
}

/// Whether to transfer the request now.
///
/// A request that asked for the fallback is transferred to a worker that has one, before its first decision; later it
/// stays. For other requests the remaining output is assumed to be as long as the output so far, within the limit.
/// Half of the texts that have reached a length go on for about as long again, and `max_tokens` is mostly far above
/// the emitted output. On those tokens 1 - 1 / speedup of the decoding time is saved, and the text's prefill is paid.
/// Both are computed with the speeds of this worker, since those of the other one are unknown; it serves the same
/// model.
pub fn should_transfer(of: &Candidacy, params: &TransferParams) -> bool {
    let Some(speedup) = of.speedup.filter(|speedup| speedup.is_finite()) else {
        return false;
    };
    if of.transferred || of.fallback_here || of.remaining_tokens_max == 0 {
        return false;
    }
    match of.asked {
        Asked::Fallback => of.decisions == 0,
        Asked::Suffix | Asked::Off => false,
        Asked::Auto => {
            let failed_here =
                of.decisions >= params.after_steps && of.misses_share >= params.misses_share_min;
            if !failed_here || speedup <= 1.0 {
                return false;
            }
            let (Some(prefill_tokens_s), Some(decode_tokens_s)) =
                (of.prefill_tokens_s, of.decode_tokens_s)
            else {
                return false;
            };
            let expected = f64::from(of.output_tokens.min(of.remaining_tokens_max));
            let saved_s = expected / decode_tokens_s * (1.0 - 1.0 / f64::from(speedup));
            let prefill_s = f64::from(of.context_tokens) / prefill_tokens_s;
            saved_s > prefill_s * params.saving_ratio_min
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
        decisions: 64,
        misses_share: 0.75,
        context_tokens: 300,
        output_tokens: 200,
        remaining_tokens_max: 1000,
        speedup: Some(2.0),
        prefill_tokens_s: Some(1000.0),
        decode_tokens_s: Some(100.0),
    };

    #[test]
    fn every_condition_counts() {
        let stays = |why: &str, change: fn(&mut Candidacy)| {
            let mut of = GOOD;
            change(&mut of);
            assert!(!should_transfer(&of, &TransferParams::default()), "{why}");
        };
        assert!(should_transfer(&GOOD, &TransferParams::default()));
        stays("came from there", |of| of.transferred = true);
        stays("drafts here", |of| of.fallback_here = true);
        stays("too few decisions", |of| of.decisions = 63);
        stays("suffix drafts do well", |of| of.misses_share = 0.74);
        stays("nobody there", |of| of.speedup = None);
        stays("slower there", |of| of.speedup = Some(0.9));
        stays("no number", |of| of.speedup = Some(f32::NAN));
        stays("no speed at all", |of| of.speedup = Some(0.0));
        stays("the prefill costs more", |of| of.context_tokens = 1000);
        stays("little is left", |of| of.remaining_tokens_max = 50);
        stays("nothing is left", |of| of.remaining_tokens_max = 0);
        stays("little is expected", |of| of.output_tokens = 50);
        stays("prefill unknown", |of| of.prefill_tokens_s = None);
        stays("decoding unknown", |of| of.decode_tokens_s = None);
        stays("no drafts wanted", |of| of.asked = Asked::Off);
        stays("suffix drafts wanted", |of| of.asked = Asked::Suffix);
    }

    #[test]
    fn who_asks_for_the_fallback_goes_at_once_and_once() {
        let asks = Candidacy {
            asked: Asked::Fallback,
            decisions: 0,
            misses_share: 0.0,
            output_tokens: 0,
            speedup: Some(1.01),
            prefill_tokens_s: None,
            decode_tokens_s: None,
            ..GOOD
        };
        let params = TransferParams::default();
        assert!(should_transfer(&asks, &params));
        let back = Candidacy {
            transferred: true,
            ..asks
        };
        assert!(!should_transfer(&back, &params));
        let here = Candidacy {
            fallback_here: true,
            ..asks
        };
        assert!(!should_transfer(&here, &params));
    }

    #[test]
    fn the_window_forgets() {
        let mut recent = RecentRoutes::default();
        assert_eq!((recent.is_empty(), recent.misses_share()), (true, 0.0));
        for route in [Route::Plain, Route::Fallback, Route::Plain, Route::Suffix] {
            recent.push(route, 4);
        }
        assert_eq!((recent.len(), recent.misses_share()), (4, 0.75));
        recent.push(Route::Suffix, 4);
        assert_eq!((recent.len(), recent.misses_share()), (4, 0.5));
        recent.push(Route::Plain, 1);
        assert_eq!((recent.len(), recent.misses_share()), (1, 1.0));
    }
}
