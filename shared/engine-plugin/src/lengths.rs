//! How long the drafts of a step are, where the engine verifies as many places of each request, drafted or not.

use refrain_speculation::router::{
    Frame, Policy, Route, Router, RouterParams, Step, StepPart, Threshold, TrialParams,
};
use std::num::NonZeroUsize;

/// Tokens per second with drafts over those without, below which the guard turns drafting off.
const GAIN_MIN: f64 = 1.0;

/// The part of a request in a step that an engine made.
#[derive(Clone, Debug)]
pub struct PaddedPart {
    /// The engine's id of the request.
    pub request: String,
    /// Prompt tokens that were read for it; 0 if it decoded.
    pub prompt_tokens: u32,
    /// Places that were verified.
    pub places: u32,
    /// Tokens that it emitted.
    pub emitted: u32,
}

/// The choice for the steps of one engine, learnt from the times that its steps took.
pub(crate) struct Lengths {
    router: Router<()>,
}

impl Lengths {
    pub(crate) fn new() -> Self {
        let params = RouterParams {
            policy: Policy::Goodput,
            threshold: Threshold::Auto,
            gain_min: GAIN_MIN,
            off_above_batch: None,
            // The statistics of acceptance are kept elsewhere.
            namespaces_max: NonZeroUsize::MIN,
            head: None,
            head_trials: TrialParams::default(),
        };
        Lengths {
            router: Router::new(params),
        }
    }

    /// The best length for a step that decodes for these requests, each given by the path probabilities of its draft.
    /// `None` if the guard holds drafts back.
    pub(crate) fn choose(
        &mut self,
        drafts: &[Vec<f32>],
        kv_tokens: u64,
        lengths: &[u32],
    ) -> Option<u32> {
        let batch = drafts.len() as u32;
        let frame = Frame {
            tokens: batch,
            kv_tokens,
            slots_max: u32::MAX,
            batch,
        };
        self.router.uniform_length(drafts, lengths, frame)
    }

    /// Takes a step into account: its seconds, and for each request its part, the length of its text, and the number
    /// of tokens that its draft was expected to bring.
    pub(crate) fn observe(
        &mut self,
        seconds: f64,
        withheld: bool,
        parts: impl Iterator<Item = (PaddedPart, u32, f32)>,
    ) {
        let items = parts.map(|(part, text_tokens, predictability)| {
            let route = match part.places {
                0 => Route::Plain,
                _ => Route::Suffix,
            };
            StepPart {
                route: (part.prompt_tokens == 0).then_some(route),
                is_auto: true,
                may_use_head: false,
                predictability,
                context_tokens: part.prompt_tokens.max(1),
                text_tokens,
                draft_tokens: part.places,
                head: None,
                head_drafted: 0,
                read_tokens: 0,
                emitted: Some(part.emitted),
            }
        });
        self.router.observe(Step {
            items: items.collect(),
            seconds,
            withheld,
            ..Step::default()
        });
        self.router.learn_step();
    }
}
