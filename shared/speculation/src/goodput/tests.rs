use super::*;
use crate::Scope;
use crate::testing::draft;

/// An engine's step: seconds by tokens.
fn takes(tokens: u32) -> f64 {
    0.001 + 0.000_2 * f64::from(tokens)
}

/// What the head takes for a pass.
const PASS_S: f64 = 0.000_05;

fn router() -> Goodput<u8> {
    Goodput::new(GoodputParams {
        namespaces_max: NonZeroUsize::new(2).unwrap(),
        off_above_batch: Some(8),
    })
}

/// A chain of `tokens`, each of this share.
fn chain(tokens: u32, share: f32) -> Candidate {
    let nodes = (0..tokens).map(|at| (at.checked_sub(1), at, share.powi(at as i32 + 1), 4));
    draft(Scope::Tenant, 8, &nodes.collect::<Vec<_>>())
}

fn wish(found: Option<&Candidate>, head: bool) -> Wish<'_, u8> {
    Wish {
        namespace: 1,
        priority: Priority::Normal,
        pace: None,
        context_tokens: 100,
        found,
        chances: &[],
        head: head.then_some(HeadWish {
            merges: false,
            depth: 4,
            tokens_max: 4,
            unread_tokens: 0,
        }),
    }
}

/// Divides a step by what the drafts are worth just then.
fn divide(router: &mut Goodput<u8>, wishes: &[Wish<'_, u8>], frame: StepFrame) -> Granted {
    let chances = |wish: &Wish<'_, u8>| {
        wish.found
            .map(|found| router.chances(wish.namespace, found))
    };
    let chances: Vec<Vec<f32>> = wishes
        .iter()
        .map(|wish| chances(wish).unwrap_or_default())
        .collect();
    let wishes = wishes
        .iter()
        .zip(&chances)
        .map(|(wish, chances)| Wish { chances, ..*wish });
    router.divide(&wishes.collect::<Vec<_>>(), frame)
}

fn frame(batch: u32, slots_max: u32) -> StepFrame {
    StepFrame {
        tokens: batch,
        kv_tokens: 0,
        slots_max,
        batch,
    }
}

/// A step of one request that computed so many tokens, and whose head drafted as many as it made passes.
fn taken(seconds: f64, draft_seconds: f64, tokens: u32, passes: u32, read: u32) -> StepTaken {
    StepTaken {
        batched_tokens: tokens,
        seconds: seconds + draft_seconds,
        draft_seconds,
        head: HeadWork {
            requests: passes.min(1),
            depth: passes,
            drafted: HeadDrafted {
                tokens: passes,
                asked_tokens: passes,
                read_tokens: read,
            },
        },
        ..StepTaken::default()
    }
}

/// Carries a step of one request out: of what was found the target says the first `true_tokens`, of the head's draft none.
/// What was granted.
fn step(
    router: &mut Goodput<u8>,
    found: Option<&Candidate>,
    head: bool,
    true_tokens: u32,
) -> Grant {
    let granted = divide(router, &[wish(found, head)], frame(1, 64));
    let grant = granted.grants[0].clone();
    let said: Vec<u32> = (0..true_tokens).chain([1000]).collect();
    if let Some(found) = found {
        router.calibration(1).observe(found, &said);
    }
    let (verified, accepted, passes) = match &grant {
        Grant::Plain => (0, 0, 0),
        Grant::Tree(nodes) => {
            let verified = nodes.len() as u32;
            (verified, verified.min(true_tokens), 0)
        }
        Grant::Head { .. } | Grant::Merged { .. } | Grant::HeadTrial => {
            router.calibration(1).observe_head(100, 4, 0);
            (4, 0, 4)
        }
    };
    let draft_seconds = f64::from(passes) * PASS_S;
    let tokens = 1 + verified;
    router.step_done(&StepTaken {
        routed: Some((1, 1 + accepted)),
        ..taken(takes(tokens), draft_seconds, tokens, passes, 0)
    });
    grant
}

#[test]
fn drafts_that_are_right_are_verified_and_wrong_ones_are_not() {
    let found = chain(8, 0.9);
    let mut router = router();
    // In between there are steps with nothing to draft: how else would it know what tokens cost?
    let mut steps = |count: u32, true_tokens: u32| {
        for _ in 0..count {
            step(&mut router, None, false, 0);
            step(&mut router, Some(&found), false, true_tokens);
        }
        step(&mut router, Some(&found), false, true_tokens)
    };
    assert_eq!(steps(200, 8), Grant::Tree((0..8).collect()));
    assert_eq!(steps(600, 0), Grant::Plain);
    // What is held back is learnt from all the same.
    assert!(matches!(steps(600, 8), Grant::Tree(_)));
    assert!(router.step_cost_error().unwrap() < 0.05);
}

/// A pass of the head takes as long for eight as for one: it pays for all of them, and for one of them it never would.
#[test]
fn a_head_that_pays_for_many_is_found_out() {
    const BATCH: u32 = 8;
    const DEAR_PASS_S: f64 = 0.000_5;
    let mut router = router();
    let mut served = 0;
    for at in 0..2_000 {
        let wishes = vec![wish(None, true); BATCH as usize];
        let granted = divide(&mut router, &wishes, frame(BATCH, 64));
        let drafting = |grant: &&Grant| matches!(grant, Grant::Head { .. } | Grant::HeadTrial);
        let requests = granted.grants.iter().filter(drafting).count() as u32;
        for _ in 0..requests {
            router.calibration(1).observe_head(100, 4, 4);
        }
        if at >= 1_900 {
            let chosen = |grant: &&Grant| matches!(grant, Grant::Head { .. });
            served += granted.grants.iter().filter(chosen).count();
        }
        let passes = if requests > 0 { 4 } else { 0 };
        let draft_seconds = f64::from(passes) * DEAR_PASS_S;
        let batched_tokens = BATCH + 4 * requests;
        router.step_done(&StepTaken {
            batched_tokens,
            seconds: takes(batched_tokens) + draft_seconds,
            draft_seconds,
            head: HeadWork {
                requests,
                depth: passes,
                drafted: HeadDrafted {
                    tokens: 4 * requests,
                    asked_tokens: 4 * requests,
                    read_tokens: 0,
                },
            },
            routed: Some((BATCH, BATCH + 4 * requests)),
            ..StepTaken::default()
        });
    }
    assert!(served > 700, "{served} of 800");
}

#[test]
fn a_head_that_is_of_no_use_is_tried_ever_more_rarely() {
    let mut router = router();
    let mut trials = Vec::new();
    for at in 0..2000 {
        if step(&mut router, None, true, 0) == Grant::HeadTrial {
            trials.push(at);
        }
    }
    let waits: Vec<i32> = trials.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(trials.len() >= 5 && trials.len() < 12, "{trials:?}");
    assert!(waits.is_sorted() && waits[0] < 32, "{waits:?}");
    // No trial where its draft has no room.
    let due = (0..5000).any(|_| {
        let granted = divide(&mut router, &[wish(None, true)], frame(1, 3));
        granted.grants[0] == Grant::HeadTrial
    });
    assert!(!due);
}

#[test]
fn a_profile_prices_the_first_step() {
    let found = chain(8, 0.5);
    let drafted = |profile: &[(u32, f64)]| {
        let mut router = router();
        router.start_from(profile);
        let granted = divide(&mut router, &[wish(Some(&found), false)], frame(1, 64));
        granted.admitted
    };
    // Knowing nothing, it takes what it gets; and where tokens are as dear as steps, only what is worth it.
    assert_eq!(drafted(&[]), 8);
    assert_eq!(
        drafted(&[(1, 0.001), (2, 0.002), (4, 0.004), (16, 0.016)]),
        0
    );
    assert_eq!(drafted(&[(1, 0.001), (16, 0.001)]), 8);
    // What was seen of steps that were made goes before a profile that comes late.
    let mut router = router();
    for _ in 0..40 {
        for tokens in [1, 4, 16] {
            router.step_done(&StepTaken {
                batched_tokens: tokens,
                seconds: takes(tokens),
                ..StepTaken::default()
            });
        }
    }
    router.start_from(&[(1, 1.0), (16, 1.0)]);
    assert!((router.cost.seconds(4, 0) / takes(4) - 1.0).abs() < 0.05);
}

#[test]
fn large_batches_draft_nothing_and_small_ones_have_no_more_room_than_there_is() {
    let found = chain(8, 0.9);
    let mut router = router();
    let wishes: Vec<_> = (0..9).map(|_| wish(Some(&found), true)).collect();
    let granted = divide(&mut router, &wishes, frame(9, 1000));
    assert!(granted.grants.iter().all(|grant| *grant == Grant::Plain));
    let granted = divide(&mut router, &wishes[..8], frame(8, 10));
    let drafted: usize = granted
        .grants
        .iter()
        .map(|grant| match grant {
            Grant::Plain => 0,
            Grant::Tree(nodes) => nodes.len(),
            Grant::Head { .. } | Grant::Merged { .. } | Grant::HeadTrial => 4,
        })
        .sum();
    assert!(0 < drafted && drafted <= 10, "{drafted}");
}

#[test]
fn namespaces_are_apart_and_the_one_unused_longest_is_forgotten() {
    let found = chain(4, 0.9);
    let mut router = router();
    let unknown = router.chances(1, &found);
    for _ in 0..50 {
        router.calibration(1).observe(&found, &[1000]);
    }
    let known = router.chances(1, &found);
    assert!(known[0] < 0.3 * unknown[0]);
    assert_eq!(router.chances(2, &found), unknown);
    router.calibration(2).observe(&found, &[1000]);
    router.calibration(1);
    router.calibration(3);
    // 2 went, 1 did not.
    assert_eq!(router.chances(2, &found), unknown);
    assert_eq!(router.chances(1, &found), known);
}

#[test]
fn steps_that_took_no_time_say_nothing() {
    let mut router = router();
    for seconds in [0.0, f64::NAN, f64::INFINITY, -1.0] {
        router.step_done(&StepTaken {
            batched_tokens: 4,
            seconds,
            routed: Some((1, 4)),
            ..StepTaken::default()
        });
    }
    assert!(!router.cost.is_known());
    assert_eq!(router.step_cost_error(), None);
}

#[test]
fn two_drafts_that_fail_apart_are_merged_where_tokens_are_cheap() {
    // One token was found, the head drafts four; each token is right in half of all cases, whatever the others are.
    let found = chain(1, 0.5);
    let run = |seconds: fn(u32) -> f64| {
        let mut random = 1u32;
        let mut coin = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            random >> 31 == 1
        };
        let mut router = router();
        let (mut merged, mut expected, mut brought) = (0, 0.0, 0.0);
        for at in 0..4000 {
            // In every other step nothing is found, or costs could not be told apart.
            let found = Some(&found).filter(|_| at % 2 == 0);
            let mut wish = wish(found, at % 3 != 1);
            if let Some(head) = &mut wish.head {
                head.merges = true;
            }
            let grant = divide(&mut router, &[wish], frame(1, 64)).grants[0].clone();
            let by_head = (0..4).take_while(|_| coin()).count() as u32;
            let is_right = coin();
            // The found token is 0. What the head says first is 0 too if both are right or both are wrong.
            let (uses_tree, uses_head) = match &grant {
                Grant::Plain => (false, false),
                Grant::Tree(_) => (true, false),
                Grant::Head { .. } | Grant::HeadTrial => (false, true),
                Grant::Merged { .. } => (true, true),
            };
            let head = if uses_head { by_head } else { 0 };
            let accepted = head.max(u32::from(uses_tree && is_right));
            let mut said: Vec<u32> = (10..10 + accepted + 1).collect();
            said[0] = if is_right { 0 } else { 9 };
            if let (Some(found), true) = (found, uses_head) {
                router.observe_beside(1, found, &said, head);
            }
            if let Some(found) = found {
                router.calibration(1).observe(found, &said);
            }
            if uses_head {
                router.calibration(1).observe_head(100, 4, head);
            }
            if let (Grant::Merged { gain, beside, .. }, true) = (&grant, at > 1000) {
                merged += 1;
                expected += gain + beside;
                brought += accepted as f32;
            }
            let computed = 1 + u32::from(uses_tree) + 4 * u32::from(uses_head);
            let draft_seconds = if uses_head { 4.0 * PASS_S } else { 0.0 };
            let passes = 4 * u32::from(uses_head);
            router.step_done(&StepTaken {
                routed: Some((1, 1 + accepted)),
                ..taken(seconds(computed), draft_seconds, computed, passes, 0)
            });
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
fn what_a_text_takes_to_read_is_charged_to_as_many_drafts_as_there_are_of_it() {
    // The head is right with all four tokens. Reading a prompt takes as long as ten plain steps.
    const PROMPT_TOKENS: u32 = 400;
    const READING_S: f64 = 3e-5;
    // Requests of so many steps: in how many of the last hundred requests did the head draft at all?
    let drafted = |steps: u32| {
        let mut router = router();
        let mut drafted = 0;
        for request in 0..500 {
            let (mut context_tokens, mut unread_tokens) = (PROMPT_TOKENS, PROMPT_TOKENS);
            let mut was_drafted = false;
            for _ in 0..steps {
                let head = HeadWish {
                    merges: false,
                    depth: 4,
                    tokens_max: 4,
                    unread_tokens,
                };
                let wish = Wish {
                    head: Some(head),
                    context_tokens,
                    ..wish(None, true)
                };
                let grant = divide(&mut router, &[wish], frame(1, 64)).grants.remove(0);
                let drafts = grant != Grant::Plain;
                if matches!(grant, Grant::Head { .. }) {
                    router.head_drafted(1, context_tokens, unread_tokens);
                    was_drafted = true;
                }
                let (mut draft_seconds, mut read_tokens) = (0.0, 0);
                if drafts {
                    router.calibration(1).observe_head(100, 4, 4);
                    // What the last steps brought is read along with the passes.
                    read_tokens = if unread_tokens > 16 { unread_tokens } else { 0 };
                    draft_seconds = 4.0 * PASS_S + f64::from(read_tokens) * READING_S;
                    unread_tokens = 0;
                }
                let tokens = if drafts { 5 } else { 1 };
                unread_tokens += tokens;
                context_tokens += tokens;
                let passes = 4 * u32::from(drafts);
                router.step_done(&StepTaken {
                    routed: Some((1, tokens)),
                    ..taken(takes(tokens), draft_seconds, tokens, passes, read_tokens)
                });
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
