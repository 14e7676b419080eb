//! Whole simulations of small workloads.

use std::io::Write;
use std::path::PathBuf;

use clap::Parser;

use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    options: SimulateOptions,
}

fn options(arguments: &str) -> SimulateOptions {
    let arguments = std::iter::once("simulate").chain(arguments.split_whitespace());
    Command::try_parse_from(arguments)
        .expect("the options are read")
        .options
}

fn runs(arguments: &str) -> Vec<RunReport> {
    let report = run(&options(arguments), |_, _| {}).expect("it is simulated");
    report
        .workloads
        .into_iter()
        .flat_map(|workload| workload.runs)
        .collect()
}

fn of(runs: &[RunReport], policy: SimulatedPolicy) -> &RunReport {
    runs.iter()
        .find(|run| run.policy == policy)
        .expect("the policy was simulated")
}

/// Requests for several times the slots, with long outputs that a KV cache cannot hold all at once.
const TIGHT: &str = "--groups 24 --group-size 8 --output-mean 800 --output-max 6000 --prompt-tokens 100 \
    --instances 4 --slots 16 --kv-tokens 12000 --chunk-tokens 512";

#[test]
fn every_policy_decodes_each_token_once_within_the_kv_cache() {
    let arguments = format!(
        "{TIGHT} --history 0.5 --policies group-fifo,divided,context,history,auto,oracle --drafts off,group,history"
    );
    let report = run(&options(&arguments), |_, _| {}).expect("it is simulated");
    let workload = &report.workloads[0];
    assert_eq!(workload.runs.len(), 18);
    for run in &workload.runs {
        assert_eq!(run.output_tokens, workload.output_tokens, "{run:?}");
        assert!(run.kv_peak <= 1.0, "{run:?}");
        assert!(run.chunks >= 192, "{run:?}");
        let has_drafts = run.drafts != SimulatedDrafts::Off;
        assert_eq!(run.accepted_per_step > 0.3, has_drafts, "{run:?}");
    }
    let fifo = of(&workload.runs, SimulatedPolicy::GroupFifo);
    assert!(fifo.preemptions > 0 && fifo.refilled_tokens > 0, "{fifo:?}");
    // The scheduler plans the room of each chunk, so nothing is preempted.
    let scheduled = workload
        .runs
        .iter()
        .filter(|run| run.policy != SimulatedPolicy::GroupFifo);
    assert!(
        scheduled
            .map(|run| run.preemptions)
            .all(|preempted| preempted == 0)
    );
}

#[test]
fn a_seed_gives_the_same_simulation() {
    let arguments = format!("{TIGHT} --policies divided,auto --drafts group");
    assert_eq!(runs(&arguments), runs(&arguments));
    let other = runs(&format!("{arguments} --seed 2"));
    assert_ne!(runs(&arguments), other);
}

#[test]
fn several_seeds_are_reported_as_their_means_and_ranges() {
    let arguments = format!("{TIGHT} --policies group-fifo,divided");
    let single = |seed: u64| runs(&format!("{arguments} --seed {seed}")).remove(1);
    let singles = [5, 6, 7].map(single);
    let all = run(
        &options(&format!("{arguments} --seed 5 --seeds 3")),
        |_, _| {},
    );
    let all = all.expect("it is simulated");
    let divided = &all.workloads[0].runs[1];
    let of = |value: fn(&RunReport) -> f64| singles.each_ref().map(value);
    let mean = |values: [f64; 3]| values.iter().sum::<f64>() / 3.0;
    assert!((divided.ratio - mean(of(|run| run.ratio))).abs() < 1e-9);
    assert!((divided.tail_s - mean(of(|run| run.tail_s))).abs() < 1e-9);
    let spread = divided.spread.as_ref().expect("several seeds");
    let ratios = of(|run| run.ratio);
    assert_eq!(spread.seeds, 3);
    assert_eq!(spread.ratio[0], ratios.into_iter().fold(f64::MAX, f64::min));
    assert_eq!(spread.ratio[1], ratios.into_iter().fold(0.0, f64::max));
    assert!(spread.ratio[0] < spread.ratio[1] && spread.ratio_error > 0.0);
    assert_eq!(singles[0].spread, None);
    let range = format!("({:.3} to {:.3})", spread.ratio[0], spread.ratio[1]);
    assert!(all.table().contains(&range), "{}", all.table());
}

#[test]
fn auto_lets_drafts_come_from_finished_members() {
    // Lengths are nearly equal, so only drafts can gain by the order.
    let seen = runs(
        "--groups 24 --group-size 8 --output-mean 400 --output-max 3000 --prompt-tokens 100 --length-sigma 0.3 \
         --instances 2 --slots 4 --kv-tokens 40000 --chunk-tokens 512 --policies divided,context,auto \
         --drafts group --seeds 2",
    );
    let [divided, context, auto] = [
        SimulatedPolicy::Divided,
        SimulatedPolicy::Context,
        SimulatedPolicy::Auto,
    ]
    .map(|policy| of(&seen, policy));
    assert!(
        auto.accepted_per_step > divided.accepted_per_step * 1.2,
        "{divided:?} {auto:?}"
    );
    assert!(
        auto.ratio > 1.1 && auto.ratio > context.ratio,
        "{context:?} {auto:?}"
    );
}

#[test]
fn true_lengths_are_not_worse_than_any_estimate_and_shuffled_groups_tell_less() {
    let long = "--groups 30 --group-size 8 --output-mean 500 --output-max 8000 --prompt-tokens 100 \
        --length-sigma 1.2 --group-correlation 0.9 --instances 4 --slots 8 --kv-tokens 400000 --chunk-tokens 1024 \
        --pool-gb-per-s 50 --policies divided,context,auto,oracle";
    let (mut gain, mut shuffled_gain) = (0.0, 0.0);
    for seed in 1..=3 {
        let seen = runs(&format!("{long} --seed {seed}"));
        let oracle = of(&seen, SimulatedPolicy::Oracle).makespan_s;
        for run in &seen {
            assert!(oracle <= run.makespan_s * 1.05, "{oracle} {run:?}");
        }
        let ratio = |runs: &[RunReport]| {
            of(runs, SimulatedPolicy::Divided).makespan_s
                / of(runs, SimulatedPolicy::Context).makespan_s
        };
        gain += ratio(&seen) / 3.0;
        shuffled_gain += ratio(&runs(&format!("{long} --seed {seed} --shuffle-groups"))) / 3.0;
    }
    assert!(gain > shuffled_gain, "{gain} {shuffled_gain}");
}

#[test]
fn a_seed_decides_the_order_of_groups_and_nothing_else_of_them() {
    let arguments = format!("{TIGHT} --policies divided");
    let plain = run(&options(&arguments), |_, _| {}).expect("it is simulated");
    let arguments = format!("{arguments} --shuffle-order");
    let shuffled = run(&options(&arguments), |_, _| {}).expect("it is simulated");
    let [plain, shuffled] = [&plain.workloads[0], &shuffled.workloads[0]];
    assert_eq!(plain.output_tokens, shuffled.output_tokens);
    assert_eq!(plain.output_max, shuffled.output_max);
    assert_ne!(plain.runs[0].makespan_s, shuffled.runs[0].makespan_s);
}

#[test]
fn ranks_of_an_engine_share_its_groups_in_the_baseline() {
    let shape = WorkloadPreset::SeerKimi.shape();
    assert_eq!((shape.instances, shape.ranks), (256, 32));
    let seen = runs("--presets seer-kimi --groups 16 --policies group-fifo,divided");
    for run in &seen {
        // 128 requests in 256 ranks: at most one request in each, so nothing is preempted.
        assert_eq!((run.preemptions, run.refilled_tokens), (0, 0), "{run:?}");
    }
}

/// Steps of 1 ms, and of 10 ms for each thousand tokens of context.
fn engine_file(folder: &std::path::Path) -> PathBuf {
    let path = folder.join("engine.toml");
    let text = "weights_gb = 1e-9\nparameters_b = 1e-9\nkv_bytes_per_token = 10000\nbandwidth_tb_per_s = 0.001\n\
        compute_tflop_per_s = 1000\nbandwidth_efficiency = 1.0\nstep_us = 1000\nrequest_us = 0\ntoken_us = 0\n";
    std::fs::write(&path, text).expect("a file is written");
    path
}

#[test]
fn the_times_of_a_tiny_case_are_those_by_hand() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("calls.jsonl");
    let call = r#"{"group":"g","prompt_token_ids":[1,2,3,4],"output_token_ids":[1,2,3,4,5]}"#;
    std::fs::write(&trace, call).expect("a file is written");
    let engine = engine_file(folder.path());
    let arguments = format!(
        "{} --engine-model {} --instances 1 --slots 2 --kv-tokens 1000 --prefill-tokens 3 --policies group-fifo,divided",
        trace.display(),
        engine.display()
    );
    // Each step takes 1 ms, and 10 us for each token of context. Two steps read the prompt, 3 and 1 tokens, at a
    // context of 4; the second one emits a token. Four steps follow, at contexts of 5 to 8.
    let by_hand = 6.0 * 1e-3 + (4.0 + 4.0 + 5.0 + 6.0 + 7.0 + 8.0) * 1e-5;
    for run in runs(&arguments) {
        assert!((run.makespan_s - by_hand).abs() < 1e-7, "{by_hand} {run:?}");
        assert!(
            (run.ttft_s - 2.0 * 1e-3 - 8.0 * 1e-5).abs() < 1e-7,
            "{run:?}"
        );
        assert_eq!((run.prefilled_tokens, run.refilled_tokens), (4, 0));
        assert_eq!((run.preemptions, run.tail_s), (0, 0.0));
    }
}

#[test]
fn recorded_samples_draft_from_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("calls.jsonl");
    let mut file = std::fs::File::create(&trace).expect("a file");
    for sample in 0..24u32 {
        let tokens: Vec<u32> = (0..200)
            .map(|at| at * 7 % 181 + 200 * (sample / 6))
            .collect();
        writeln!(
            file,
            r#"{{"group":"{}","output_token_ids":{tokens:?}}}"#,
            sample / 6
        )
        .expect("a line");
    }
    let arguments = format!(
        "{} --instances 2 --slots 1 --kv-tokens 4000 --chunk-tokens 64 --policies divided --drafts off,group \
         --draft-rules goodput,mba",
        trace.display()
    );
    let seen = runs(&arguments);
    let found: Vec<_> = seen
        .iter()
        .map(|run| (run.drafts, run.draft_rule))
        .collect();
    assert_eq!(
        found,
        [
            (SimulatedDrafts::Off, None),
            (SimulatedDrafts::Group, Some(DraftRule::Goodput)),
            (SimulatedDrafts::Group, Some(DraftRule::Mba)),
        ]
    );
    assert!(seen.iter().all(|run| run.output_tokens == 24 * 200));
    assert!(seen[1].accepted_per_step > 0.5, "{:?}", seen[1]);
    assert!(seen[1].makespan_s < seen[0].makespan_s, "{seen:?}");
    assert!(seen[2].makespan_s < seen[0].makespan_s, "{seen:?}");
}

#[test]
fn turns_go_where_their_text_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("calls.jsonl");
    let mut file = std::fs::File::create(&trace).expect("a file");
    for turn in 0..6u32 {
        for session in 0..24u32 {
            let prompt: Vec<u32> = (0..300 * (turn + 1))
                .map(|at| at + session * 10_000)
                .collect();
            let output: Vec<u32> = (0..20)
                .map(|at| 300 * (turn + 1) + at + session * 10_000)
                .collect();
            writeln!(
                file,
                r#"{{"session":"{session}","prompt_token_ids":{prompt:?},"output_token_ids":{output:?}}}"#
            )
            .expect("a line");
        }
    }
    let arguments = format!(
        "{} --placements round_robin,least_loaded,sglang,kv --instances 4 --slots 8 --kv-tokens 20000 --sessions 12 \
         --think-s 0.5",
        trace.display()
    );
    let report = run(&options(&arguments), |_, _| {}).expect("it is simulated");
    let workload = &report.workloads[0];
    let bounds = workload.bounds.as_ref().expect("conversations have bounds");
    let read: Vec<u64> = workload
        .runs
        .iter()
        .map(|run| run.prefilled_tokens)
        .collect();
    assert!(read[3] < read[0] && read[3] < read[1], "{read:?}");
    assert!(bounds.read_without_limit <= read[3], "{bounds:?} {read:?}");
    assert!(
        bounds.read_without_limit <= bounds.read_with_one_cache,
        "{bounds:?}"
    );
    assert!(
        workload
            .runs
            .iter()
            .all(|run| run.output_tokens == 24 * 6 * 20)
    );
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    for (arguments, wanted) in [
        ("--policies history", "needs --history"),
        ("--drafts history", "need --history"),
        ("--kv-tokens 100", "raise --kv-tokens"),
        ("--paths 3", "--paths must be 1, 2 or 4"),
        ("--scale 0", "--scale must be more than 0"),
        ("--seeds 0", "--seeds must be from 1"),
        ("no/such/file", "no/such/file"),
    ] {
        let error = run(&options(arguments), |_, _| {}).expect_err(arguments);
        let error = format!("{error:#}");
        assert!(error.contains(wanted), "{arguments}: {error}");
    }
}

#[test]
fn the_page_and_the_table_name_every_policy() {
    let report = run(
        &options(&format!("{TIGHT} --policies group-fifo,auto")),
        |_, _| {},
    );
    let report = report.expect("it is simulated");
    let page = html::html(&report).expect("a page");
    for wanted in ["group-fifo", "auto", "Requests that are not done", "<svg"] {
        assert!(page.contains(wanted), "{wanted}");
    }
    assert!(report.table().contains("makespan"));
    let json = serde_json::to_value(&report).expect("a report");
    let run = &json["workloads"][0]["runs"][1];
    for key in [
        "policy",
        "drafts",
        "throughput_tokens_per_s",
        "makespan_s",
        "tail_s",
        "preemptions",
        "prefilled_tokens",
        "refilled_tokens",
        "moved_tokens",
        "accepted_per_step",
        "ttft_s",
    ] {
        assert!(!run[key].is_null(), "{key}");
    }
}
