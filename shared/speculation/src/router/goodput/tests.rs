use std::num::NonZeroUsize;

use refrain_suffix_index::Token;

use super::super::{
    Asked, HeadParams, HeadState, Policy, Priority, StepPart, Threshold, TrialParams,
};
use super::*;
use crate::candidate::Scope;
use crate::testing::draft;

/// Seconds of an engine's step by tokens.
fn takes(tokens: u32) -> f64 {
    0.001 + 0.000_2 * f64::from(tokens)
}

/// Seconds of one pass of the head.
const PASS_S: f64 = 0.000_05;

const IN_USE: Fallback = Fallback::InUse { break_even: None };

fn router() -> Goodput<u8> {
    with_head(false)
}

fn with_head(merges: bool) -> Goodput<u8> {
    Goodput::new(RouterParams {
        policy: Policy::Goodput,
        threshold: Threshold::Auto,
        gain_min: 0.0,
        off_above_batch: None,
        namespaces_max: NonZeroUsize::new(2).unwrap(),
        head: Some(HeadParams {
            depth: 4,
            tokens_max: 4,
            merges,
        }),
        head_trials: TrialParams::default(),
    })
}

/// A chain of `tokens`, each of this share.
fn chain(tokens: u32, share: f32) -> Candidate {
    let nodes = (0..tokens).map(|at| (at.checked_sub(1), at, share.powi(at as i32 + 1), 4));
    draft(Scope::Tenant, 8, &nodes.collect::<Vec<_>>())
}

fn prospect(found: Option<&Candidate>, head: bool) -> Prospect<u8> {
    Prospect {
        namespace: 1,
        asked: Asked::Auto,
        context_tokens: 100,
        draft_max: 64,
        tree_max: 64,
        candidate: found.cloned(),
        path_probabilities: Vec::new(),
        price: None,
        withheld: false,
        head: match head {
            true => HeadState::Ready { unread_tokens: 0 },
            false => HeadState::Absent,
        },
        priority: Priority::Normal,
        pace: None,
    }
}

/// Offers drafts by the present estimates.
fn offer(router: &mut Goodput<u8>, mut prospects: Vec<Prospect<u8>>, frame: Frame) -> Vec<Offer> {
    for prospect in &mut prospects {
        if let Some(found) = &prospect.candidate {
            prospect.path_probabilities = router.path_probabilities(prospect.namespace, found);
        }
    }
    let mut offers = Vec::new();
    let keyed = prospects.into_iter().enumerate().collect();
    router.offer(keyed, frame, IN_USE, &mut offers);
    offers.sort_by_key(|(number, _)| *number);
    offers.into_iter().map(|(_, offer)| offer).collect()
}

fn frame(batch: u32, slots_max: u32) -> Frame {
    Frame {
        tokens: batch,
        kv_tokens: 0,
        slots_max,
        batch,
    }
}

/// An item that verified `draft_tokens` and emitted so many; the head made so many passes for it.
fn item(draft_tokens: u32, passes: u32, emitted: u32) -> StepPart {
    StepPart {
        route: Some(Route::Plain),
        is_auto: true,
        may_use_head: true,
        predictability: 0.0,
        context_tokens: 1,
        text_tokens: 0,
        draft_tokens,
        head: (passes > 0).then_some(HeadDraft {
            depth: passes,
            tokens_max: passes,
        }),
        head_drafted: passes,
        read_tokens: 0,
        emitted: Some(emitted),
    }
}

fn made(items: Vec<StepPart>, seconds: f64, draft_seconds: f64) -> Step {
    Step {
        items,
        seconds: seconds + draft_seconds,
        draft_seconds,
        ..Step::default()
    }
}

fn learn(router: &mut Goodput<u8>, offer: &Offer, emitted: &[Token], head_accepted: u32) {
    let outcome = Outcome {
        emitted,
        head_drafted: offer.head().is_some(),
        head_accepted,
    };
    router.learn(1, offer, &outcome);
}

fn nodes(offer: &Offer) -> u32 {
    offer.sent_tokens()
}

/// Makes a step of one request: the target agrees with the first `true_tokens` of the suffix draft, and with none of
/// the head's. Returns the offer.
fn step(
    router: &mut Goodput<u8>,
    found: Option<&Candidate>,
    head: bool,
    true_tokens: u32,
) -> Offer {
    let offer = offer(router, vec![prospect(found, head)], frame(1, 64)).remove(0);
    let emitted: Vec<Token> = (0..true_tokens).chain([1000]).collect();
    learn(router, &offer, &emitted, 0);
    let verified = offer.sent_tokens();
    let passes = offer.head().map_or(0, |head| head.depth);
    let accepted = verified.min(true_tokens);
    let mut item = item(verified, passes, 1 + accepted);
    item.predictability = offer.predictability;
    let draft_seconds = f64::from(passes) * PASS_S;
    router.learn_step(&made(vec![item], takes(1 + verified), draft_seconds));
    offer
}

#[test]
fn drafts_that_are_right_are_verified_and_wrong_ones_are_not() {
    let found = chain(8, 0.9);
    let mut router = router();
    // In between there are steps without a draft; else the router could not learn the cost of tokens.
    let mut steps = |count: u32, true_tokens: u32| {
        for _ in 0..count {
            step(&mut router, None, false, 0);
            step(&mut router, Some(&found), false, true_tokens);
        }
        nodes(&step(&mut router, Some(&found), false, true_tokens))
    };
    assert_eq!(steps(200, 8), 8);
    assert_eq!(steps(600, 0), 0);
    // Drafts that are held back are learnt from all the same.
    assert!(steps(600, 8) > 0);
    assert!(router.step_cost_error().unwrap() < 0.05);
}

/// A pass of the head takes as long for eight requests as for one: it pays for all of them, and never would for one.
#[test]
fn a_head_that_pays_for_many_is_found_out() {
    const BATCH: u32 = 8;
    const DEAR_PASS_S: f64 = 0.000_5;
    let mut router = router();
    let mut served = 0;
    for at in 0..2_000 {
        let prospects = (0..BATCH).map(|_| prospect(None, true)).collect();
        let offers = offer(&mut router, prospects, frame(BATCH, 64));
        let mut items = Vec::new();
        for offer in &offers {
            let drafts = offer.head().is_some();
            if drafts {
                learn(&mut router, offer, &[1, 2, 3, 4, 5], 4);
            }
            let tokens = if drafts { 4 } else { 0 };
            items.push(item(tokens, tokens, 1 + tokens));
            if at >= 1_900 && offer.decision.reason == RouteReason::WithinBudget {
                served += 1;
            }
        }
        let requests = offers.iter().filter(|offer| offer.head().is_some()).count() as u32;
        let passes = if requests > 0 { 4 } else { 0 };
        let draft_seconds = f64::from(passes) * DEAR_PASS_S;
        router.learn_step(&made(items, takes(BATCH + 4 * requests), draft_seconds));
    }
    assert!(served > 700, "{served} of 800");
}

#[test]
fn a_useless_head_is_tried_ever_more_rarely() {
    let mut router = router();
    let mut trials = Vec::new();
    for at in 0..2000 {
        if step(&mut router, None, true, 0).decision.reason == RouteReason::Probe {
            trials.push(at);
        }
    }
    let waits: Vec<i32> = trials.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(trials.len() >= 5 && trials.len() < 12, "{trials:?}");
    assert!(waits.is_sorted() && waits[0] < 32, "{waits:?}");
    // There is no trial where its draft has no room.
    let due = (0..5000).any(|_| {
        let offers = offer(&mut router, vec![prospect(None, true)], frame(1, 3));
        offers[0].decision.reason == RouteReason::Probe
    });
    assert!(!due);
}

#[test]
fn a_profile_prices_the_first_step() {
    let found = chain(8, 0.5);
    let drafted = |profile: &[(u32, f64)]| {
        let mut router = router();
        router.start_from_profile(profile);
        nodes(
            &offer(
                &mut router,
                vec![prospect(Some(&found), false)],
                frame(1, 64),
            )[0],
        )
    };
    // Without any knowledge all is verified; where tokens are as expensive as steps, only what is worth it.
    assert_eq!(drafted(&[]), 8);
    assert_eq!(
        drafted(&[(1, 0.001), (2, 0.002), (4, 0.004), (16, 0.016)]),
        0
    );
    assert_eq!(drafted(&[(1, 0.001), (16, 0.001)]), 8);
    // Steps that were made are worth more than a profile that comes late.
    let mut router = router();
    for _ in 0..40 {
        for tokens in [1, 4, 16] {
            router.learn_step(&made(vec![item(tokens - 1, 0, 1)], takes(tokens), 0.0));
        }
    }
    router.start_from_profile(&[(1, 1.0), (16, 1.0)]);
    assert!((router.cost.seconds(4, 0) / takes(4) - 1.0).abs() < 0.05);
}

#[test]
fn a_step_has_no_more_drafts_than_room() {
    let found = chain(8, 0.9);
    let mut router = router();
    let prospects = (0..8).map(|_| prospect(Some(&found), true)).collect();
    let offers = offer(&mut router, prospects, frame(8, 10));
    let drafted: u32 = offers.iter().map(Offer::tokens_max).sum();
    assert!(0 < drafted && drafted <= 10, "{drafted}");
}

#[test]
fn namespaces_are_apart_and_the_least_recently_used_is_forgotten() {
    let found = chain(4, 0.9);
    let mut router = router();
    let unknown = router.path_probabilities(1, &found);
    for _ in 0..50 {
        router.statistics(1).observe(&found, &[1000]);
    }
    let known = router.path_probabilities(1, &found);
    assert!(known[0] < 0.3 * unknown[0]);
    assert_eq!(router.path_probabilities(2, &found), unknown);
    router.statistics(2).observe(&found, &[1000]);
    router.statistics(1);
    router.statistics(3);
    // Namespace 2 went, 1 did not.
    assert_eq!(router.path_probabilities(2, &found), unknown);
    assert_eq!(router.path_probabilities(1, &found), known);
}

#[test]
fn impossible_times_and_failed_requests_are_left_out() {
    let mut router = router();
    for seconds in [0.0, f64::NAN, f64::INFINITY, -1.0] {
        router.learn_step(&made(vec![item(3, 0, 4)], seconds, 0.0));
    }
    let failed = StepPart {
        emitted: None,
        ..item(3, 0, 4)
    };
    router.learn_step(&made(vec![failed], 0.01, 0.0));
    assert!(!router.cost.is_known());
    assert_eq!(router.step_cost_error(), None);
}

#[test]
fn two_drafts_that_fail_independently_are_merged_where_tokens_are_cheap() {
    // One token was found, the head drafts four. Each token is right in half of all cases, whatever the others are.
    let found = chain(1, 0.5);
    let run = |seconds: fn(u32) -> f64| {
        let mut random = 1u32;
        let mut coin = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            random >> 31 == 1
        };
        let mut router = with_head(true);
        let (mut merged, mut expected, mut brought) = (0, 0.0, 0.0);
        for at in 0..4000 {
            // In every other step nothing is found; else costs could not be told apart.
            let found = Some(&found).filter(|_| at % 2 == 0);
            let prospect = prospect(found, at % 3 != 1);
            let offer = offer(&mut router, vec![prospect], frame(1, 64)).remove(0);
            let by_head = (0..4).take_while(|_| coin()).count() as u32;
            let is_right = coin();
            // The found token is 0. The head's first token is 0 too if both are right or both are wrong.
            let (uses_tree, uses_head) = (offer.suffix().is_some(), offer.head().is_some());
            let head = if uses_head { by_head } else { 0 };
            let accepted = head.max(u32::from(uses_tree && is_right));
            let mut emitted: Vec<Token> = (10..10 + accepted + 1).collect();
            emitted[0] = if is_right { 0 } else { 9 };
            learn(&mut router, &offer, &emitted, head);
            if let (OfferedDraft::Merged(..), true) = (&offer.draft, at > 1000) {
                merged += 1;
                expected += offer.expected.unwrap() + offer.expected_of_head.unwrap();
                brought += accepted as f32;
            }
            let drafted = u32::from(uses_tree) + 4 * u32::from(uses_head);
            let draft_seconds = if uses_head { 4.0 * PASS_S } else { 0.0 };
            let mut item = item(drafted, 4 * u32::from(uses_head), 1 + accepted);
            item.predictability = offer.predictability;
            router.learn_step(&made(vec![item], seconds(1 + drafted), draft_seconds));
        }
        (merged, expected, brought)
    };
    let (merged, expected, brought) = run(|tokens| 0.001 + 0.000_01 * f64::from(tokens));
    assert!(merged > 500, "{merged}");
    assert!(
        (expected / brought - 1.0).abs() < 0.1,
        "{expected} expected, {brought} came"
    );
    let (merged, ..) = run(|tokens| 0.001 * f64::from(tokens));
    assert_eq!(merged, 0);
}

#[test]
fn the_reading_of_a_text_is_charged_to_all_drafts_that_it_serves() {
    // The head is right with all four tokens. Reading a prompt takes as long as ten plain steps.
    const PROMPT_TOKENS: u32 = 400;
    const READING_S: f64 = 3e-5;
    // In how many of the last hundred requests, of so many steps each, did the head draft at all?
    let drafted = |steps: u32| {
        let mut router = router();
        let mut drafted = 0;
        for request in 0..500 {
            let (mut context_tokens, mut unread_tokens) = (PROMPT_TOKENS, PROMPT_TOKENS);
            let mut was_drafted = false;
            for _ in 0..steps {
                let prospect = Prospect {
                    head: HeadState::Ready { unread_tokens },
                    context_tokens,
                    ..prospect(None, true)
                };
                let offer = offer(&mut router, vec![prospect], frame(1, 64)).remove(0);
                let drafts = offer.head().is_some();
                was_drafted |= offer.decision.reason == RouteReason::WithinBudget && drafts;
                let (mut draft_seconds, mut read_tokens) = (0.0, 0);
                if drafts {
                    learn(&mut router, &offer, &[1, 2, 3, 4, 5], 4);
                    // The tokens of the last steps are read along with the passes.
                    read_tokens = if unread_tokens > 16 { unread_tokens } else { 0 };
                    draft_seconds = 4.0 * PASS_S + f64::from(read_tokens) * READING_S;
                    unread_tokens = 0;
                }
                let tokens = if drafts { 5 } else { 1 };
                unread_tokens += tokens;
                context_tokens += tokens;
                let item = StepPart {
                    read_tokens,
                    ..item(tokens - 1, tokens - 1, tokens)
                };
                router.learn_step(&made(vec![item], takes(tokens), draft_seconds));
            }
            drafted += u32::from(was_drafted && request >= 400);
        }
        drafted
    };
    // Four tokens more are worth four steps of 1.2 ms; a draft takes 1 ms more than none, and the prompt 12 ms once.
    assert_eq!(drafted(30), 100, "thirty drafts for one reading");
    let alone = drafted(1);
    assert!(alone < 40, "one draft for each reading: {alone}");
}
