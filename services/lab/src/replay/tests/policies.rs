//! Policies on a modelled engine, over generated calls.

use serde_json::{Value, json};

use super::super::{Policy, PolicyReport, ReplayReport};
use super::{naive, replay};

/// Calls of agents: much common text, with some text of their own in between.
fn calls() -> Vec<Value> {
    (0..6).flat_map(naive::calls).collect()
}

fn compare(calls: &[Value], args: &str) -> anyhow::Result<ReplayReport> {
    replay(calls, &format!("--engine-model h100-8b {args}"))
}

fn row(report: &ReplayReport, policy: Policy, concurrency: usize) -> &PolicyReport {
    let mut rows = report.policies.iter();
    rows.find(|row| (row.policy, row.concurrency) == (policy, concurrency))
        .expect("the policy was compared")
}

/// The figures that do not depend on the machine.
fn figures(report: &ReplayReport) -> Value {
    let mut rows = serde_json::to_value(&report.policies).expect("a report");
    for row in rows.as_array_mut().expect("rows") {
        row["propose_us_per_step"] = Value::Null;
    }
    rows
}

#[test]
fn every_policy_is_told_of_for_each_number_of_requests() -> anyhow::Result<()> {
    let report = compare(&calls(), "--concurrency 1,8")?;
    let told: Vec<_> = report
        .policies
        .iter()
        .map(|row| (row.policy, row.concurrency))
        .collect();
    let all = [1, 8]
        .into_iter()
        .flat_map(|at| Policy::OWN.map(|policy| (policy, at)));
    assert_eq!(told, all.collect::<Vec<_>>());
    let json = serde_json::to_value(&report)?;
    let numbers = [
        "concurrency",
        "goodput_tokens_per_s",
        "speedup",
        "tokens_per_step",
        "drafted_per_step",
        "expected_per_step",
        "accepted_per_step",
        "head_share",
    ];
    for (row, policy) in json["policies"].as_array().expect("rows").iter().zip(told) {
        assert_eq!(row["policy"], policy.0.name());
        for key in numbers {
            assert!(row[key].is_number(), "{key}: {row}");
        }
        let reliability = row["reliability"].as_array().expect("a table");
        assert_eq!(reliability.is_empty(), policy.0 == Policy::Off, "{row}");
    }
    for concurrency in [1, 8] {
        let off = row(&report, Policy::Off, concurrency);
        assert_eq!(
            (off.speedup, off.tokens_per_step, off.drafted_per_step),
            (Some(1.0), Some(1.0), Some(0.0))
        );
        assert_eq!(
            (off.expected_per_step, off.head_share),
            (Some(1.0), Some(0.0))
        );
        assert_eq!(
            row(&report, Policy::Eagle3, concurrency).head_share,
            Some(1.0)
        );
        assert_eq!(
            row(&report, Policy::Suffix, concurrency).head_share,
            Some(0.0)
        );
    }
    // The rest of the report is about suffix drafts at the first number of requests.
    let suffix = row(&report, Policy::Suffix, 1);
    assert_eq!(suffix.tokens_per_step, report.tokens_per_step);
    assert_eq!(suffix.drafted_per_step, report.drafted_per_step);
    assert_eq!(
        replay(&calls(), "")?.tokens_per_step,
        report.tokens_per_step
    );
    Ok(())
}

#[test]
fn goodput_is_that_of_the_best_choice() -> anyhow::Result<()> {
    // A head that drafts well, one that drafts badly, and an expensive one.
    for head in ["acc=0.8,0.7,0.6", "acc=0.05", "acc=0.7,0.6,cost=1"] {
        let report = compare(&calls(), &format!("--concurrency 1,16 --eagle3 {head}"))?;
        for concurrency in [1, 16] {
            let speedup = |policy| row(&report, policy, concurrency).speedup.expect("steps");
            let best = Policy::OWN.map(speedup).into_iter().fold(0.0, f64::max);
            let goodput = speedup(Policy::Goodput);
            // The calls are few, and the policy has learnt nothing before.
            assert!(
                goodput > 0.95 * best && goodput > 1.0,
                "{head} at {concurrency}: {goodput} of {best}"
            );
        }
    }
    Ok(())
}

#[test]
fn what_is_expected_is_about_what_comes() -> anyhow::Result<()> {
    let report = compare(&calls(), "--concurrency 1,8")?;
    for row in report
        .policies
        .iter()
        .filter(|row| row.policy != Policy::Off)
    {
        let expected = row.expected_per_step.expect("steps") - 1.0;
        let accepted = row.accepted_per_step.expect("steps");
        assert!((expected / accepted - 1.0).abs() < 0.15, "{row:?}");
    }
    Ok(())
}

#[test]
fn tau_leads_from_one_draft_to_the_other() -> anyhow::Result<()> {
    for (tau, like) in [("0", Policy::Suffix), ("1000", Policy::Eagle3)] {
        let report = compare(
            &calls(),
            &format!("--concurrency 4 --score-threshold {tau}"),
        )?;
        let (score, like) = (row(&report, Policy::Score, 4), row(&report, like, 4));
        assert_eq!(
            score.goodput_tokens_per_s, like.goodput_tokens_per_s,
            "{tau}"
        );
        assert_eq!(score.head_share, like.head_share, "{tau}");
    }
    let report = compare(&calls(), "--concurrency 4")?;
    let share = row(&report, Policy::Score, 4).head_share.expect("steps");
    assert!(share > 0.1 && share < 0.9, "{share}");
    Ok(())
}

#[test]
fn a_seed_gives_the_same_figures() -> anyhow::Result<()> {
    let run = |args: &str| compare(&calls(), &format!("--concurrency 1,8 {args}"));
    let first = run("--seed 7")?;
    assert_eq!(figures(&first), figures(&run("--seed 7")?));
    let other = run("--seed 8")?;
    assert_ne!(figures(&first), figures(&other));
    for policy in [Policy::Off, Policy::Suffix] {
        let same = |report| row(report, policy, 8).goodput_tokens_per_s;
        assert_eq!(same(&first), same(&other), "{policy:?} has no luck");
    }
    // The head's acceptance does not depend on the other requests.
    let eagle3 = |at| row(&first, Policy::Eagle3, at);
    assert_eq!(eagle3(1).tokens_per_step, eagle3(8).tokens_per_step);
    Ok(())
}

#[test]
fn a_step_takes_what_the_model_says() -> anyhow::Result<()> {
    // One request of 3 tokens after a prompt of 2, without drafts: three steps of one token, over contexts of 2, 3
    // and 4.
    let calls = [json!({"prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5]})];
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("engine.toml");
    // Reading the weights takes 1 s, each token of a context 1/8 s, and nothing else takes time.
    std::fs::write(
        &file,
        "weights_gb = 1\nparameters_b = 1e-9\nkv_bytes_per_token = 125e6\nbandwidth_tb_per_s = 1e-3\n\
         bandwidth_efficiency = 1\ncompute_tflop_per_s = 1\nstep_us = 0\nrequest_us = 0\ntoken_us = 0\n",
    )?;
    let args = format!("--engine-model {} --policies off,eagle3", file.display());
    let report = replay(&calls, &format!("{args} --eagle3 acc=1,cost=0.5"))?;
    let goodput = |policy| row(&report, policy, 1).goodput_tokens_per_s.expect("steps");
    let near = |found: f64, wanted: f64| {
        assert!((found / wanted - 1.0).abs() < 1e-6, "{found} for {wanted}");
    };
    near(goodput(Policy::Off), 3.0 / (3.0 + 9.0 / 8.0));
    // Two tokens in the first step and one in the second, each after half a step of drafting.
    near(goodput(Policy::Eagle3), 3.0 / (2.0 * 1.5 + 6.0 / 8.0));
    Ok(())
}

#[test]
fn windows_tell_how_a_memory_gets_used_to_its_calls() -> anyhow::Result<()> {
    let song = |from: u32| json!({"output_token_ids": (from..from + 31).collect::<Vec<u32>>()});
    // Ten calls without repetition, and ten equal calls.
    let calls: Vec<Value> = (0..10)
        .map(|call| song(call * 100))
        .chain((0..10).map(|_| song(0)))
        .collect();
    let report = replay(&calls, "--sources global --window 10")?;
    let told: Vec<_> = report.windows.iter().map(|window| window.docs).collect();
    assert_eq!(told, [10, 20]);
    assert_eq!(report.windows[0].tokens_per_step, Some(1.0));
    assert_eq!(report.windows[1].tokens_per_step, Some(31.0 / 5.0));
    Ok(())
}

#[test]
fn policies_in_one_call_each_once_and_with_windows() -> anyhow::Result<()> {
    let args = "--policies off,eagle3,suffix,score,goodput,off --concurrency 1,16,64,1 --window 9";
    let report = replay(&calls(), args)?;
    let told: Vec<_> = report
        .policies
        .iter()
        .map(|row| (row.concurrency, row.policy))
        .collect();
    let all = [1, 16, 64].map(|at| Policy::OWN.map(|policy| (at, policy)));
    assert_eq!(told, all.concat());
    for row in &report.policies {
        let windows = row.windows.last().map(|window| window.docs);
        assert_eq!(windows, Some(report.docs / 9 * 9), "{row:?}");
    }
    assert_eq!(row(&report, Policy::Suffix, 1).windows, report.windows);
    assert!(report.table().contains("\ngoodput at 64 "));
    let json = serde_json::to_value(&report)?;
    assert_eq!(json["settings"]["engine_model"], "h100-8b");
    assert_eq!(json["settings"]["concurrency"], json!([1, 16, 64]));
    assert_eq!(json["settings"]["policies"], json!(Policy::OWN));
    // There are no policies without a comparison, and repeated values are no comparison.
    let report = replay(&calls(), "--concurrency 2,2")?;
    assert!(report.policies.is_empty());
    Ok(())
}

#[test]
fn tenants_learn_chances_of_their_own() -> anyhow::Result<()> {
    // In one tenant all copies continue alike, in the other they do not.
    let (mut steady, mut fickle, mut mixed) = (Vec::new(), Vec::new(), Vec::new());
    for call in 0..40 {
        let song = |turn: u32| (0..20).map(|at| at + turn * (at % 3)).collect::<Vec<u32>>();
        steady.push(json!({"tenant": "a", "output_token_ids": song(0)}));
        fickle.push(json!({"tenant": "b", "output_token_ids": song(call * 100)}));
        mixed.extend(
            [steady.last().cloned(), fickle.last().cloned()]
                .into_iter()
                .flatten(),
        );
    }
    // These drafts do not depend on acceptance statistics, so only those could be shared.
    let expected = |calls: &[Value]| -> anyhow::Result<f64> {
        let report = replay(calls, "--policies suffix")?;
        let row = row(&report, Policy::Suffix, 1);
        Ok((row.expected_per_step.expect("steps") - 1.0) * report.steps as f64)
    };
    let (apart, together) = (expected(&steady)? + expected(&fickle)?, expected(&mixed)?);
    assert!((together / apart - 1.0).abs() < 1e-6, "{together} {apart}");
    Ok(())
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (args, wanted) in [
        ("--engine-model tpu", "neither a preset (h100-8b"),
        ("--policies best", "invalid value 'best'"),
        ("--concurrency 1,16", "several numbers for --concurrency"),
        (
            "--concurrency 1,0 --policies off",
            "--concurrency must be at least 1",
        ),
        ("--score-threshold high", "must be `auto` or a number"),
        ("--score-threshold -1", "must be `auto` or a number"),
        ("--eagle3 acc=2", "a probability must be from 0 to 1"),
        ("--window 0", "--window must be at least 1"),
        ("--eagle3 acc=0.5", "<--policies <POLICY>|--engine-model"),
        ("--score-threshold 2", "<--policies <POLICY>|--engine-model"),
        ("--seed 2", "<--policies <POLICY>|--engine-model"),
        ("--reliability", "<--policies <POLICY>|--engine-model"),
    ] {
        let args = args.replace(" -1", "=-1");
        let said = match replay(&[json!({"output_token_ids": [1]})], &args) {
            Ok(_) => panic!("{args} was taken"),
            Err(error) => format!("{error:#}"),
        };
        assert!(said.contains(wanted), "{args}: {said}");
    }
}
