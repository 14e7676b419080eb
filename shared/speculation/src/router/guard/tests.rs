use super::super::StepPart;
use super::*;

/// A step of `batch` requests that emit `tokens` together, with suffix drafts unless they are withheld.
fn step(batch: u32, tokens: u32, seconds: f64, withheld: bool) -> Step {
    let item = |at: u32| StepPart {
        route: Some(if withheld {
            Route::Plain
        } else {
            Route::Suffix
        }),
        is_auto: true,
        may_use_head: false,
        predictability: 0.0,
        context_tokens: 1,
        text_tokens: 100,
        draft_tokens: 0,
        head: None,
        head_drafted: 0,
        read_tokens: 0,
        emitted: Some(tokens / batch + u32::from(at < tokens % batch)),
    };
    Step {
        items: (0..batch).map(item).collect(),
        seconds,
        withheld,
        ..Step::default()
    }
}

/// Runs steps of four requests that take `seconds(withheld)`, and emit 8 tokens with drafts and 4 without. Returns
/// the number of withheld steps and the last verdict.
fn run(guard: &mut Guard, steps: u32, seconds: impl Fn(bool) -> f64) -> (u32, Verdict) {
    let mut withheld_steps = 0;
    let mut last = None;
    for _ in 0..steps {
        let withheld = guard.withholds(4, true);
        withheld_steps += u32::from(withheld);
        let tokens = if withheld { 4 } else { 8 };
        let step = step(4, tokens, seconds(withheld), withheld);
        last = guard.observe(&step, Phase::default()).or(last);
    }
    (withheld_steps, last.expect("steps with drafts"))
}

#[test]
fn drafts_that_lose_are_held_back_and_drafts_that_pay_are_not() {
    // Twice the tokens in three times the time, and in one and a half times.
    for (drafted_s, in_use) in [(0.03, false), (0.015, true)] {
        let mut guard = Guard::new(0.97, Guarded::AllDrafts);
        let (withheld, verdict) = run(&mut guard, 4000, |withheld| match withheld {
            true => 0.01,
            false => drafted_s,
        });
        assert_eq!(verdict.in_use, in_use, "{drafted_s}");
        assert_eq!(verdict.batch, 4);
        let gain = verdict.gain.expect("both ways were tried");
        assert!((gain / (0.02 / drafted_s) - 1.0).abs() < 0.05, "{gain}");
        // The other way is tried for little of the time.
        match in_use {
            true => assert!(0 < withheld && withheld < 200, "{withheld}"),
            false => assert!(withheld > 3000, "{withheld}"),
        }
        // Other batch sizes are not affected.
        assert!(!guard.withholds(64, true));
    }
}

#[test]
fn a_change_is_told_once() {
    let mut guard = Guard::new(0.97, Guarded::SuffixDrafts);
    let mut changes = 0;
    for _ in 0..2000 {
        let withheld = guard.withholds(1, true);
        let step = step(1, 1, if withheld { 0.01 } else { 0.03 }, withheld);
        let verdict = guard.observe(&step, Phase::default());
        changes += u32::from(verdict.expect("evidence").changed);
    }
    assert_eq!(changes, 1);
}

#[test]
fn a_step_without_guarded_drafts_is_no_evidence() {
    let mut with_head = step(2, 2, 0.01, false);
    for item in &mut with_head.items {
        item.route = Some(Route::Fallback);
    }
    let mut plain = with_head.clone();
    for item in &mut plain.items {
        item.route = Some(Route::Plain);
    }
    let mut asked = step(2, 2, 0.01, false);
    for item in &mut asked.items {
        item.is_auto = false;
    }
    let is_evidence = |guarded, step: &Step| {
        let mut guard = Guard::new(0.97, guarded);
        guard.observe(step, Phase::default()).is_some()
    };
    for guarded in [Guarded::SuffixDrafts, Guarded::AllDrafts] {
        assert!(is_evidence(guarded, &step(2, 2, 0.01, false)));
        assert!(!is_evidence(guarded, &plain));
        assert!(!is_evidence(guarded, &asked));
    }
    assert!(is_evidence(Guarded::AllDrafts, &with_head));
    assert!(!is_evidence(Guarded::SuffixDrafts, &with_head));
}

#[test]
fn trials_of_the_head_come_first() {
    let mut guard = Guard::new(0.97, Guarded::SuffixDrafts);
    let on_trial = Phase {
        on_trial: true,
        in_use: false,
    };
    let drafted = step(2, 2, 0.01, false);
    assert_eq!(guard.observe(&drafted, on_trial), None);
    // The guard starts no trial where it may not.
    for _ in 0..5000 {
        guard.observe(&drafted, Phase::default());
        if guard.is_on_trial(2) {
            break;
        }
    }
    assert!(guard.withholds(2, true) && !guard.withholds(2, false));
}

#[test]
fn a_step_that_may_not_try_pays_for_no_trial() {
    let mut guard = Guard::new(0.97, Guarded::AllDrafts);
    // Every second step reads a prompt as well.
    let (mut withheld_steps, mut read_with_drafts) = (0, 0);
    for at in 0..4000 {
        let reads = at % 2 == 1;
        let on_trial = guard.is_on_trial(4);
        let withheld = guard.withholds(4, !reads);
        assert!(!(reads && withheld), "drafts are in use");
        withheld_steps += u32::from(withheld);
        read_with_drafts += u32::from(reads && on_trial);
        let tokens = if withheld { 4 } else { 8 };
        let mut step = step(4, tokens, 0.01, withheld);
        if reads {
            let prompt = StepPart {
                route: None,
                ..step.items[0]
            };
            step.items.push(prompt);
        }
        guard.observe(&step, Phase::default());
    }
    assert!(withheld_steps > 0 && read_with_drafts > 0);
}
