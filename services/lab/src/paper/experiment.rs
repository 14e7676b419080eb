//! Papers and their experiments.

use super::input::Input;
use super::needs::Needs;
use super::report::Findings;

/// A paper, in the version whose figures are shown.
#[derive(Debug)]
pub(super) struct Paper {
    pub(super) title: &'static str,
    pub(super) version: &'static str,
    pub(super) experiments: &'static [Experiment],
}

/// An experiment of a paper.
#[derive(Debug)]
pub(super) struct Experiment {
    pub(super) name: &'static str,
    /// Where it stands in the paper.
    pub(super) place: &'static str,
    pub(super) title: &'static str,
    /// The paper's words about it.
    pub(super) claim: &'static str,
    pub(super) needs: Needs,
    pub(super) run: fn(&Input<'_>) -> anyhow::Result<Findings>,
}

impl Experiment {
    pub(super) const fn new(
        name: &'static str,
        place: &'static str,
        title: &'static str,
        claim: &'static str,
        needs: Needs,
        run: fn(&Input<'_>) -> anyhow::Result<Findings>,
    ) -> Self {
        Experiment {
            name,
            place,
            title,
            claim,
            needs,
            run,
        }
    }
}
