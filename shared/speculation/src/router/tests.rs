//! Offers belong to the requests whose prospects they were made from.

use std::num::NonZeroUsize;

use proptest::prelude::*;
use refrain_suffix_index::Token;

use super::*;
use crate::candidate::{Candidate, Scope};
use crate::testing::draft;

/// A request: how it asks, the length of its suffix draft, what it can use, and the state of its head.
type Asks = (u8, u32, u32, u8);

/// The suffix draft of the request with this number, whose tokens tell the number.
fn found(number: usize, tokens: u32) -> Option<Candidate> {
    let nodes: Vec<_> = (0..tokens)
        .map(|at| (at.checked_sub(1), number as Token, 0.9, 4))
        .collect();
    (tokens > 0).then(|| draft(Scope::Tenant, 8, &nodes))
}

fn prospect(number: usize, &(asked, tokens, draft_max, head): &Asks) -> Prospect<u8> {
    Prospect {
        namespace: (number % 3) as u8,
        asked: match asked {
            0 => Asked::Off,
            1 => Asked::Suffix,
            2 => Asked::Fallback,
            _ => Asked::Auto,
        },
        context_tokens: 1_000 + number as u32,
        draft_max,
        tree_max: draft_max,
        candidate: found(number, tokens),
        path_probabilities: Vec::new(),
        price: None,
        withheld: false,
        head: match head {
            0 => HeadState::Absent,
            1 => HeadState::Blind,
            _ => HeadState::Ready { unread_tokens: 0 },
        },
        priority: Priority::Normal,
        pace: None,
    }
}

fn router(policy: Policy, merges: bool, off_above_batch: Option<u32>) -> Router<u8> {
    Router::new(RouterParams {
        policy,
        threshold: Threshold::Auto,
        gain_min: 0.0,
        off_above_batch,
        namespaces_max: NonZeroUsize::MIN,
        head: Some(HeadParams {
            depth: 4,
            tokens_max: 4,
            merges,
        }),
        head_trials: TrialParams::default(),
    })
}

proptest! {
    #[test]
    fn each_request_gets_one_offer_and_it_is_its_own(
        requests in prop::collection::vec((0u8..8, 0u32..6, 0u32..9, 0u8..4), 0..12),
        policy in prop::sample::select(vec![Policy::Score, Policy::Goodput]),
        merges in any::<bool>(),
        off_above_batch in prop::option::of(0u32..12),
        slots_max in 0u32..40,
        steps in 1usize..4,
    ) {
        let mut router = router(policy, merges, off_above_batch);
        let batch = requests.len() as u32;
        let frame = Frame { tokens: batch, kv_tokens: 0, slots_max, batch };
        // Trials of the head come after some steps.
        for _ in 0..steps {
            let prospects = requests.iter().enumerate().map(|(number, asks)| {
                let mut prospect = prospect(number, asks);
                prospect.path_probabilities = router.estimate(&prospect);
                (number, prospect)
            });
            let prospects = prospects.collect();
            let mut offers = router.offer(prospects, frame);
            offers.sort_by_key(|(number, _)| *number);
            let numbers: Vec<usize> = offers.iter().map(|(number, _)| *number).collect();
            prop_assert_eq!(numbers, (0..requests.len()).collect::<Vec<_>>());
            for (number, offer) in &offers {
                prop_assert_eq!(offer.context_tokens, 1_000 + *number as u32);
                let drafts = offer.suffix().into_iter().chain(&offer.found);
                for token in drafts.flat_map(|draft| draft.tree.tokens()) {
                    prop_assert_eq!(token, *number as Token);
                }
            }
        }
    }
}
