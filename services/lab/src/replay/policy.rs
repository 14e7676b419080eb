//! The policies that a replay compares.

use clap::ValueEnum;
use serde::Serialize;

use super::presets::Preset;

/// A rule that chooses drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// No drafts.
    Off,
    /// Always the EAGLE-3 head's drafts.
    Eagle3,
    /// Suffix drafts wherever a match is found.
    Suffix,
    /// SuffixDecoding's hybrid: the suffix draft if its SCORE exceeds tau, else the head's.
    Score,
    /// The drafts that bring most tokens per second for the whole batch, by observed acceptance and step times.
    Goodput,
    /// Suffix drafts of one length for the whole batch, by Seer's rule (MBA).
    Mba,
    /// Chains of one length for the whole batch, all of whose places are verified, drafted or not, as in vLLM's Model
    /// Runner V2. The length is chosen a step ahead, by what drafts are expected to bring and what steps take.
    Padded,
    /// Chains whose tokens vLLM's adaptive verification admits: as many as are expected to pay by the drafts of the
    /// last step, and those of the present drafts that are most likely to be accepted.
    Adaptive,
    /// As --preset sam; the head drafts where no match is longer than four tokens.
    Sam,
    /// As --preset pld.
    Pld,
    /// As --preset paper; the head drafts where SCORE does not exceed tau.
    Paper,
}

impl Policy {
    /// The policies that are compared if none are named: all but those of other systems.
    pub const OWN: [Policy; 5] = [
        Policy::Off,
        Policy::Eagle3,
        Policy::Suffix,
        Policy::Score,
        Policy::Goodput,
    ];

    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it drafts from earlier outputs.
    pub(super) fn remembers(self) -> bool {
        !matches!(self, Policy::Off | Policy::Eagle3)
    }
}

impl From<Preset> for Policy {
    fn from(preset: Preset) -> Self {
        match preset {
            Preset::Sam => Policy::Sam,
            Preset::Pld => Policy::Pld,
            Preset::Paper => Policy::Paper,
        }
    }
}
