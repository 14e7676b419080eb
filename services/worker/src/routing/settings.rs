//! The settings of drafts, fitted to the abilities of the engine.

use std::num::NonZeroUsize;

use refrain_protocol::chunk::Speculation;
use refrain_protocol::engine::{DrafterKind, EngineCapabilities, SelfDraft};
use refrain_speculation::draft::{Expansion, ProposeRules};
use refrain_speculation::router::{
    Decision, HeadDraft, HeadParams, Policy, Route, RouterParams, Threshold,
};

use crate::config::{FallbackChoice, RouterChoice, SpeculationConfig, WorkerConfig};
use crate::running::HeadUse;

/// The sources that requests may draft from, and the sizes of their drafts.
#[derive(Clone, Debug)]
pub(crate) struct DraftSettings {
    pub(crate) rules: ProposeRules,
    threshold: Threshold,
    /// The drafter inside the engine, if it is the fallback.
    drafter: Option<EngineDrafter>,
    /// The engine verifies its own drafts and others as one tree.
    merges: bool,
}

/// A drafter inside the engine, and the largest draft that it is asked for.
#[derive(Clone, Copy, Debug)]
struct EngineDrafter {
    kind: DrafterKind,
    largest: SelfDraft,
}

impl DraftSettings {
    pub(crate) fn new(config: &SpeculationConfig, capabilities: &EngineCapabilities) -> Self {
        let mut rules = config.rules();
        if !capabilities.tree_drafts {
            rules.params.expansion = Expansion::Linear;
        }
        let asked = &config.drafter;
        let drafter = capabilities
            .drafter
            .filter(|_| config.fallback == FallbackChoice::Own);
        let drafter = drafter.map(|drafter| EngineDrafter {
            kind: drafter.kind,
            largest: SelfDraft {
                depth: asked.depth.min(drafter.depth_max),
                top_k: if capabilities.tree_drafts {
                    asked.top_k.min(drafter.top_k_max)
                } else {
                    1
                },
                tokens_max: asked.tokens_max,
                path_prob_min: asked.path_prob_min,
                sampled: asked.sampled,
            },
        });
        DraftSettings {
            rules,
            threshold: config.score_threshold.into(),
            drafter,
            // Drawn tokens are judged by another rule than found ones.
            merges: capabilities.tree_drafts && !asked.sampled,
        }
    }

    /// The settings of the router.
    pub(super) fn router_params(&self, config: &WorkerConfig) -> RouterParams {
        let speculation = &config.speculation;
        let namespaces_max = NonZeroUsize::new(config.replica.namespaces_max);
        RouterParams {
            policy: match speculation.router {
                RouterChoice::Score => Policy::Score,
                RouterChoice::Goodput => Policy::Goodput,
            },
            threshold: self.threshold,
            gain_min: speculation.gain_min,
            off_above_batch: Some(speculation.off_above_batch).filter(|batch| *batch > 0),
            namespaces_max: namespaces_max.unwrap_or(NonZeroUsize::MIN),
            head: self.drafter.map(|drafter| HeadParams {
                depth: drafter.largest.depth,
                tokens_max: drafter.largest.tokens_max,
                merges: self.merges,
            }),
            head_trials: speculation.drafter.trials,
        }
    }

    /// The drafter inside the engine, if it is the fallback.
    pub(crate) fn drafter(&self) -> Option<DrafterKind> {
        self.drafter.map(|drafter| drafter.kind)
    }

    /// Whether `auto` requests may use that drafter.
    pub(super) fn may_use_head(&self) -> bool {
        self.drafter.is_some() && self.threshold.allows_fallback()
    }

    /// The use that such requests make of the engine's drafter. Sessions that are opened for it cost the engine
    /// memory.
    pub(crate) fn head_use(&self, speculation: Speculation) -> HeadUse {
        let drafter = self.drafter();
        HeadUse {
            drafter,
            self_drafts: match speculation {
                Speculation::Auto => self.may_use_head(),
                Speculation::Eagle3 => drafter == Some(DrafterKind::Eagle3),
                Speculation::DraftModel => drafter == Some(DrafterKind::DraftModel),
                Speculation::Suffix | Speculation::Off => false,
            },
        }
    }

    /// The request to the engine's drafter.
    pub(crate) fn self_draft(&self, head: HeadDraft) -> Option<SelfDraft> {
        let drafter = self.drafter?;
        Some(SelfDraft {
            depth: head.depth,
            tokens_max: head.tokens_max,
            ..drafter.largest
        })
    }

    /// The labels of a decision in metrics; `None` is a piece of a prompt, which has no decision.
    pub(crate) fn labels(&self, decision: Option<Decision>) -> (&'static str, &'static str) {
        let Some(Decision { route, reason }) = decision else {
            return ("prefill", "prompt");
        };
        let label = match (route, self.drafter()) {
            (Route::Fallback, Some(kind)) => kind.as_str(),
            _ => route.as_str(),
        };
        (label, reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ExpansionChoice;

    #[test]
    fn engines_without_trees_get_chains_whatever_is_set() {
        let expansion = |choice, tree_drafts| {
            let capabilities = serde_json::json!({
                "model": "m",
                "tokenizer": "t",
                "vocab_size": 100,
                "max_context": 100,
                "max_batch": 1,
                "max_step_tokens": 100,
                "max_sessions": 1,
                "tree_drafts": tree_drafts,
                "max_draft_tokens": 16,
                "eos_token_ids": [],
            });
            let config = SpeculationConfig {
                expansion: choice,
                ..SpeculationConfig::default()
            };
            let capabilities = serde_json::from_value(capabilities).unwrap();
            DraftSettings::new(&config, &capabilities)
                .rules
                .params
                .expansion
        };
        for (choice, wanted) in [
            (ExpansionChoice::Tree, Expansion::Tree),
            (ExpansionChoice::Linear, Expansion::Linear),
            (ExpansionChoice::Paths(2), Expansion::Paths(2)),
        ] {
            assert_eq!(expansion(choice, true), wanted);
            assert_eq!(expansion(choice, false), Expansion::Linear);
        }
    }
}
