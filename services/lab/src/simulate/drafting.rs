//! The tokens that drafts bring the requests of a step.
//!
//! Where the recorded tokens are known, drafts come from the real suffix index, see [`TokenDrafts`]. Otherwise a
//! model says how many tokens a step brings, by the number of finished samples of the group.

use super::decoding::{Decoding, Drafted};
use super::options::{DraftRule, SimulatedDrafts};
use super::token_drafts::{DraftSettings, TokenDrafts};
use super::workload::Workload;
use crate::replay::{DRAFT_TOKENS_MAX, EngineModel, StepLoad, draft_tokens, expected_tokens};

/// Steps after which drafts are planned anew, since other samples have finished meanwhile.
const STEPS_MAX: u32 = 64;
/// Mean tokens per step by finished samples of the group (Seer, Table 2), for one, two and four chains.
const TOKENS_PER_STEP: [(f64, [f64; 3]); 4] = [
    (0.0, [1.70, 1.77, 1.85]),
    (1.0, [2.04, 2.14, 2.25]),
    (5.0, [2.32, 2.44, 2.59]),
    (15.0, [2.53, 2.69, 2.85]),
];
/// The table reaches so far.
const REFERENCES_MAX: usize = 15;

/// A source of drafts.
pub(super) enum Drafting {
    Off,
    Model(ModelDrafts),
    Tokens(Box<TokenDrafts>),
}

impl Drafting {
    pub(super) fn plan(
        &mut self,
        instance: usize,
        now_s: f64,
        decoding: &[Decoding],
        load: StepLoad,
        engine: &EngineModel,
    ) -> anyhow::Result<Drafted> {
        match self {
            Drafting::Off => Ok(Drafted {
                gains: vec![1.0; decoding.len()],
                draft_tokens: 0,
                host_s: 0.0,
                steps_max: u32::MAX,
            }),
            Drafting::Model(model) => Ok(model.plan(decoding, load, engine)),
            Drafting::Tokens(tokens) => tokens.plan(instance, now_s, decoding),
        }
    }

    /// Most tokens that a step may bring a request.
    pub(super) fn most_tokens(&self) -> f64 {
        match self {
            Drafting::Off => 1.0,
            Drafting::Model(model) => 1.0 + model.draft_tokens_max() as f64,
            Drafting::Tokens(tokens) => 1.0 + tokens.draft_tokens_max() as f64,
        }
    }

    /// A request has all of its output.
    pub(super) fn finished(&mut self, job: usize) {
        match self {
            Drafting::Off => {}
            Drafting::Model(model) => model.finished(job),
            Drafting::Tokens(tokens) => tokens.finished(job),
        }
    }
}

/// Drafts by a model of acceptance.
pub(super) struct ModelDrafts {
    groups: Vec<usize>,
    /// Samples of each group that can be drafted from.
    references: Vec<usize>,
    /// The acceptance of a token, by the number of references.
    acceptance: Vec<f64>,
    settings: DraftSettings,
}

impl ModelDrafts {
    pub(super) fn new(workload: &Workload, settings: DraftSettings) -> Self {
        let known = |group: usize| match settings.drafts {
            SimulatedDrafts::History => workload.known[group].samples,
            SimulatedDrafts::Off | SimulatedDrafts::Request | SimulatedDrafts::Group => 0,
        };
        ModelDrafts {
            groups: workload.jobs.iter().map(|job| job.group).collect(),
            references: (0..workload.groups).map(known).collect(),
            acceptance: (0..=REFERENCES_MAX)
                .map(|references| acceptance(tokens_per_step(references, settings.paths)))
                .collect(),
            settings,
        }
    }

    fn draft_tokens_max(&self) -> usize {
        DRAFT_TOKENS_MAX.max(self.settings.draft_tokens)
    }

    fn finished(&mut self, job: usize) {
        if self.settings.drafts != SimulatedDrafts::Request {
            self.references[self.groups[job]] += 1;
        }
    }

    fn plan(&self, decoding: &[Decoding], load: StepLoad, engine: &EngineModel) -> Drafted {
        let acceptance: Vec<f64> = decoding
            .iter()
            .map(|one| self.acceptance[self.references[self.groups[one.job]].min(REFERENCES_MAX)])
            .collect();
        let step_seconds = |draft_tokens: usize| {
            engine.step_seconds(load.with_drafts(draft_tokens, decoding.len()))
                + self.settings.host_s(draft_tokens, decoding.len())
        };
        let depths = match self.settings.rule {
            _ if self.settings.is_off(decoding.len()) => vec![0; acceptance.len()],
            DraftRule::Fixed => vec![self.settings.draft_tokens; acceptance.len()],
            DraftRule::Mba => {
                let mean = acceptance.iter().sum::<f64>() / acceptance.len().max(1) as f64;
                let more =
                    |tokens: usize| tokens.saturating_sub(decoding.len()) * self.settings.paths;
                let positions = [mean; DRAFT_TOKENS_MAX];
                let (depth, _) = draft_tokens((decoding.len(), 0), &positions, |tokens| {
                    step_seconds(more(tokens))
                });
                vec![depth; acceptance.len()]
            }
            DraftRule::Goodput => self.best_depths(&acceptance, step_seconds),
        };
        let gains = acceptance
            .iter()
            .zip(&depths)
            .map(|(accepts, depth)| expected_tokens(&vec![*accepts; *depth], *depth));
        let draft_tokens = depths.iter().sum::<usize>() * self.settings.paths;
        Drafted {
            gains: gains.collect(),
            draft_tokens,
            host_s: self.settings.host_s(draft_tokens, decoding.len()),
            steps_max: STEPS_MAX,
        }
    }

    /// The depths that bring most tokens per second: each draft goes on while its next token is accepted with at
    /// least some probability, which is the same for all.
    fn best_depths(&self, acceptance: &[f64], step_seconds: impl Fn(usize) -> f64) -> Vec<usize> {
        let depths_above = |least: f64| -> Vec<usize> {
            let depth = |accepts: &f64| {
                let mut path = 1.0;
                (0..DRAFT_TOKENS_MAX)
                    .take_while(|_| {
                        path *= accepts;
                        path >= least
                    })
                    .count()
            };
            acceptance.iter().map(depth).collect()
        };
        let per_second = |depths: &[usize]| {
            let tokens = acceptance.iter().zip(depths);
            let tokens = tokens
                .map(|(accepts, depth)| expected_tokens(&[*accepts; DRAFT_TOKENS_MAX], *depth));
            let draft_tokens = depths.iter().sum::<usize>() * self.settings.paths;
            tokens.sum::<f64>() / step_seconds(draft_tokens)
        };
        let mut best = vec![0; acceptance.len()];
        let mut best_per_second = per_second(&best);
        for twentieths in (1..20).rev() {
            let depths = depths_above(f64::from(twentieths) / 20.0);
            let at = per_second(&depths);
            if at > best_per_second {
                (best, best_per_second) = (depths, at);
            }
        }
        best
    }
}

/// Tokens per step with this many references, between the rows of the table by the logarithm of their number.
fn tokens_per_step(references: usize, paths: usize) -> f64 {
    let column = match paths {
        4.. => 2,
        2.. => 1,
        _ => 0,
    };
    let at = (1.0 + references as f64).ln();
    let mut below = TOKENS_PER_STEP[0];
    for row in TOKENS_PER_STEP {
        if row.0 >= references as f64 {
            let (from, to) = ((1.0 + below.0).ln(), (1.0 + row.0).ln());
            let share = if to > from {
                (at - from) / (to - from)
            } else {
                0.0
            };
            return below.1[column] + share * (row.1[column] - below.1[column]);
        }
        below = row;
    }
    below.1[column]
}

/// The acceptance of a token at which the longest draft brings this many tokens per step.
fn acceptance(tokens_per_step: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle: f64 = (low + high) / 2.0;
        if expected_tokens(&[middle; DRAFT_TOKENS_MAX], DRAFT_TOKENS_MAX) < tokens_per_step {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_met_at_its_rows_and_between_them() {
        assert_eq!(tokens_per_step(0, 1), 1.70);
        assert_eq!(tokens_per_step(5, 2), 2.44);
        assert_eq!(tokens_per_step(15, 4), 2.85);
        let between = tokens_per_step(3, 1);
        assert!((2.04..2.32).contains(&between), "{between}");
        let accepts = acceptance(2.04);
        assert!((expected_tokens(&[accepts; 8], 8) - 2.04).abs() < 1e-9);
    }
}
