use super::*;

/// Runs steps of four requests that take `seconds(withheld)`, and emit 8 tokens with drafts and 4 without. How many
/// were withheld, and what the last verdict was.
fn run(guard: &mut Guard, steps: u32, seconds: impl Fn(bool) -> f64) -> (u32, Verdict) {
    let mut withheld_steps = 0;
    let mut last = None;
    for _ in 0..steps {
        let withheld = guard.withholds(4, true);
        withheld_steps += u32::from(withheld);
        let step = GuardedStep {
            batch: 4,
            tokens: if withheld { 4 } else { 8 },
            seconds: seconds(withheld),
            withheld,
            concerned: true,
            is_clean: true,
        };
        last = guard.step_done(&step, HeadUse::default()).or(last);
    }
    (withheld_steps, last.expect("steps with drafts"))
}

#[test]
fn what_loses_is_held_back_and_what_pays_is_not() {
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
        // Other sizes of batch are no business of this one.
        assert!(!guard.withholds(64, true));
    }
}

#[test]
fn news_is_told_once() {
    let mut guard = Guard::new(0.97, Guarded::SuffixDrafts);
    let mut changes = 0;
    for _ in 0..2000 {
        let withheld = guard.withholds(1, true);
        let step = GuardedStep {
            batch: 1,
            tokens: 1,
            seconds: if withheld { 0.01 } else { 0.03 },
            withheld,
            concerned: true,
            is_clean: true,
        };
        let verdict = guard.step_done(&step, HeadUse::default());
        changes += u32::from(verdict.expect("evidence").changed);
    }
    assert_eq!(changes, 1);
}

#[test]
fn a_step_without_drafts_is_no_evidence_and_a_trial_of_others_comes_first() {
    let mut guard = Guard::new(0.97, Guarded::AllDrafts);
    let idle = GuardedStep {
        batch: 2,
        tokens: 2,
        seconds: 0.01,
        withheld: false,
        concerned: false,
        is_clean: true,
    };
    assert_eq!(guard.step_done(&idle, HeadUse::default()), None);
    let on_trial = HeadUse {
        on_trial: true,
        in_use: false,
    };
    let concerned = GuardedStep {
        concerned: true,
        ..idle
    };
    assert_eq!(guard.step_done(&concerned, on_trial), None);
    // While it looks at what goes without, it does not when others try something.
    for _ in 0..5000 {
        guard.step_done(&concerned, HeadUse::default());
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
        let step = GuardedStep {
            batch: 4,
            tokens: if withheld { 4 } else { 8 },
            seconds: 0.01,
            withheld,
            concerned: true,
            is_clean: !reads,
        };
        guard.step_done(&step, HeadUse::default());
    }
    assert!(withheld_steps > 0 && read_with_drafts > 0);
}
