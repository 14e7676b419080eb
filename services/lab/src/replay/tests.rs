//! Counts of small replays. Some are worked out by hand, many are compared with a replay that keeps nothing between
//! steps.

mod experiments;
mod naive;
mod policies;
mod presets;
mod shapes;

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::{Value, json};

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: ReplayOptions,
}

/// Writes the calls to a file and replays it with these arguments. `WARM` stands for the same file. Unless the
/// arguments have others, drafts are those of the paper: alpha is 1, and a token has a probability of at least 0.1.
fn replay(calls: &[Value], args: &str) -> anyhow::Result<ReplayReport> {
    let folder = tempfile::tempdir()?;
    let args = of_the_paper(args);
    let path = write(folder.path(), "calls.jsonl", calls)?;
    let args = args.replace("WARM", &path);
    let args = ["replay", &path].into_iter().chain(args.split_whitespace());
    run(&Cli::try_parse_from(args)?.options, |_| {})
}

/// The arguments, with those of the paper where they have none.
fn of_the_paper(args: &str) -> String {
    let mut args = args.to_owned();
    for (option, value) in [("--alpha", "1"), ("--min-token-prob", "0.1")] {
        if !args.contains(option) && !args.contains("--preset") {
            args = format!("{option} {value} {args}");
        }
    }
    args
}

/// Replays the calls after other, warm calls.
fn replay_after(known: &[Value], calls: &[Value], args: &str) -> anyhow::Result<ReplayReport> {
    let folder = tempfile::tempdir()?;
    let known = write(folder.path(), "known.jsonl", known)?;
    replay(calls, &format!("{args} --warm {known}"))
}

/// Writes a trace file; returns its path.
fn write(folder: &Path, name: &str, calls: &[Value]) -> anyhow::Result<String> {
    let path = folder.join(name);
    let lines: Vec<String> = calls.iter().map(Value::to_string).collect();
    std::fs::write(&path, lines.join("\n"))?;
    Ok(path.to_str().expect("a path in UTF-8").to_owned())
}

/// Steps, drafted, accepted and emitted tokens of one source.
fn counts(report: &ReplayReport, source: &str) -> [u64; 4] {
    let counts = report.sources.get(source).copied().unwrap_or_default();
    [
        counts.steps,
        counts.drafted,
        counts.accepted,
        counts.emitted,
    ]
}

fn total(report: &ReplayReport) -> [u64; 4] {
    ["request", "group", "global", "none"]
        .map(|source| counts(report, source))
        .into_iter()
        .fold([0; 4], |sum, counts| {
            std::array::from_fn(|at| sum[at] + counts[at])
        })
}

/// Fifteen tokens, each once.
fn song() -> Value {
    json!((1..=15).collect::<Vec<u32>>())
}

#[test]
fn a_second_copy_doubles_its_match_at_every_step() -> anyhow::Result<()> {
    let calls = [
        json!({"output_token_ids": song()}),
        json!({"output_token_ids": song()}),
    ];
    // The first copy is decoded token by token. The second emits its first token, then drafts 1 token for a pattern
    // of 1, 3 for one of 3 and 7 for one of 7. Each step adds a bonus token: 1 + 2 + 4 + 8.
    let report = replay(&calls, "--sources global")?;
    assert_eq!(counts(&report, "none"), [16, 0, 0, 16]);
    assert_eq!(counts(&report, "global"), [3, 11, 11, 14]);
    assert_eq!(
        (report.docs, report.steps, report.output_tokens),
        (2, 19, 30)
    );
    assert_eq!(report.acceptance_rate, Some(1.0));
    assert_eq!(report.tokens_per_step, Some(30.0 / 19.0));
    assert_eq!(report.drafted_per_step, Some(11.0 / 19.0));

    for (args, steps, drafted) in [
        ("--frozen", 30, 0),
        ("--frozen --warm WARM", 8, 22),
        ("--warm WARM", 8, 22),
        ("--frozen --warm WARM --docs 1", 4, 11),
        ("--docs 1", 15, 0),
        ("--docs 0", 0, 0),
        // 1 + 2 + 3 + 3 + 3 + 3; all steps but the first draft.
        ("--warm WARM --frozen --seal-tokens 1", 8, 22),
        ("--max-spec-tokens 2", 15 + 6, 9),
        // 1 + 2 + 4 + 2 + ... with a pattern of 3 and 3 draft tokens, of 4 and 2, of 5 and 1.
        ("--match-plus-draft 6", 15 + 5, 1 + 3 + 3 + 3),
        ("--max-pattern 2", 15 + 6, 9),
        // 1 + 2 + 2 + 2 + 2 + 2 + 2 + 2.
        ("--alpha 0 --offset 1", 15 + 8, 7),
        // 1 + 4 + 10: patterns of 1 and 5.
        ("--alpha 2 --offset 1", 15 + 3, 3 + 10),
        // A single copy has a probability of at most one half.
        ("--min-token-prob 0.6", 30, 0),
        ("--linear", 19, 11),
    ] {
        let report = replay(&calls, &format!("--sources global {args}"))?;
        let [all, drafted_all, ..] = total(&report);
        assert_eq!((all, drafted_all), (steps, drafted), "{args}");
    }
    Ok(())
}

#[test]
fn a_request_drafts_from_its_prompt() -> anyhow::Result<()> {
    let calls = [json!({"prompt_token_ids": song(), "output_token_ids": song()})];
    // The prompt is the first copy. The beginning of the output follows it, so the last draft reads on into the
    // output: it is 7 tokens long, and 8 tokens are left.
    let report = replay(&calls, "--sources request")?;
    assert_eq!(counts(&report, "request"), [3, 11, 11, 14]);
    assert_eq!(counts(&report, "none"), [1, 0, 0, 1]);
    // Prompts of other requests are never drafted from, and its own prompt only with that source.
    assert_eq!(total(&replay(&calls, "--sources group,global")?)[1], 0);
    // The last draft is one token longer than what is left, and there is no bonus token at the end of the recording.
    let short =
        [json!({"prompt_token_ids": song(), "output_token_ids": (1..=13).collect::<Vec<u32>>()})];
    let report = replay(&short, "--sources request")?;
    assert_eq!(counts(&report, "request"), [3, 11, 10, 12]);
    assert_eq!((report.prompt_tokens, report.output_tokens), (15, 13));
    Ok(())
}

#[test]
fn groups_and_tenants_see_their_own() -> anyhow::Result<()> {
    let call = |tenant: Option<&str>, group: Option<&str>| json!({"tenant": tenant, "group": group, "output_token_ids": song()});
    let calls = [
        call(None, Some("g")),
        call(None, Some("h")),
        call(None, None),
        call(Some("t"), Some("g")),
        call(None, Some("g")),
        call(Some("t"), None),
        call(None, None),
    ];
    // Only the fifth call has an earlier sample of its group.
    let report = replay(&calls, "--sources group")?;
    assert_eq!(counts(&report, "group"), [3, 11, 11, 14]);
    assert_eq!(report.steps, 6 * 15 + 4);
    assert_eq!((report.sizes.groups, report.insert_us_per_token), (3, None));
    // All calls but the first of each tenant have an earlier copy.
    let report = replay(&calls, "--sources global")?;
    assert_eq!(report.steps, 2 * 15 + 5 * 4);
    assert_eq!((report.sizes.namespaces, report.sizes.groups), (2, 0));
    // The group wins a tie with the namespace.
    let twice = [call(None, Some("g")), call(None, Some("g"))];
    let report = replay(&twice, "")?;
    assert_eq!(
        (counts(&report, "group")[0], counts(&report, "global")[0]),
        (3, 0)
    );
    Ok(())
}

#[test]
fn requests_in_flight_see_each_other() -> anyhow::Result<()> {
    let call =
        |session: &str, output: Value| json!({"session": session, "output_token_ids": output});
    // Both are always at the same position, so there is nothing to draft.
    let abreast = [call("a", song()), call("b", song())];
    assert_eq!(
        total(&replay(&abreast, "--sources global --concurrency 2")?)[..2],
        [30, 0]
    );
    // Calls of one session wait for each other.
    let turns = [call("a", song()), call("a", song())];
    assert_eq!(
        total(&replay(&turns, "--sources global --concurrency 2")?)[..2],
        [19, 11]
    );
    // The third call takes the slot of the second after 5 rounds, when the first has emitted 5 tokens. It catches up
    // with 1 + 2 + 4 + 2 tokens (only one of the 7 that it might draft exists). From the ninth token on both are at
    // the same position.
    let staggered = [
        call("a", song()),
        call("x", json!([91, 92, 93, 94, 95])),
        call("b", song()),
    ];
    let report = replay(&staggered, "--sources global --concurrency 2")?;
    assert_eq!(counts(&report, "global"), [3, 5, 5, 8]);
    assert_eq!(report.steps, 15 + 5 + 10);
    Ok(())
}

#[test]
fn every_step_equals_that_of_a_replay_without_state() -> anyhow::Result<()> {
    for (seed, args) in [
        (1, "--sources global --tree"),
        (2, "--sources request"),
        (3, "--sources group"),
        (4, "--tree --min-token-prob 0.1"),
        (18, ""),
        (5, "--linear --sources request,global"),
        (6, "--frozen --warm WARM --sources group,global"),
        (7, "--concurrency 3 --tree --max-spec-tokens 32"),
        (8, "--concurrency 5 --linear --alpha 2 --min-token-prob 0.3"),
        (9, "--concurrency 4 --frozen --warm WARM --max-pattern 3"),
        (10, "--max-spec-tokens 3 --offset 2 --warm WARM"),
        (11, "--concurrency 100 --sources group,global"),
        (12, "--paths 2 --alpha 3"),
        (13, "--match-plus-draft 8 --max-pattern 6"),
    ] {
        check(&naive::calls(seed), args)?;
    }
    Ok(())
}

#[test]
fn sealing_does_not_change_the_counts() -> anyhow::Result<()> {
    for (seed, args) in [
        (14, "--seal-tokens 1"),
        (15, "--seal-tokens 60 --concurrency 4 --sources global"),
        (16, "--seal-tokens 90 --concurrency 3 --warm WARM"),
        (17, "--seal-tokens 1 --warm WARM --frozen --concurrency 2"),
    ] {
        let mut calls = naive::calls(seed);
        let args = &format!("{args} --samples 0");
        // Without left contexts, because a draft that runs from one into its output counts in the live part only.
        for call in &mut calls {
            call["prompt_token_ids"] = json!([]);
        }
        let report = check(&calls, args)?;
        assert!(
            report.sizes.segments > 0 && report.sizes.segment_bytes > 0,
            "{args}"
        );
        let seals = !args.contains("--frozen");
        assert_eq!(report.seal_us_per_token.is_some(), seals, "{args}");
    }
    Ok(())
}

/// Replays the calls and compares every count with the naive replay's.
fn check(calls: &[Value], args: &str) -> anyhow::Result<ReplayReport> {
    let report = replay(calls, args)?;
    let expected = naive::replay(calls, args);
    let found = ["request", "group", "global", "none"].map(|source| counts(&report, source));
    assert_eq!(found, expected, "{args}");
    assert!(
        total(&report)[2] > 20,
        "{args}: hardly anything is accepted"
    );
    Ok(report)
}

#[test]
fn figures_without_a_measurement_are_null() -> anyhow::Result<()> {
    let nothing = [json!({"output_token_ids": []})];
    let report = serde_json::to_value(replay(&nothing, "")?)?;
    for key in [
        "tokens_per_step",
        "drafted_per_step",
        "acceptance_rate",
        "propose_us",
    ] {
        assert_eq!(report[key], Value::Null, "{key}");
    }
    let report = serde_json::to_value(replay(
        &[json!({"output_token_ids": song()})],
        "--warm WARM",
    )?)?;
    let numbers = [
        "docs",
        "prompt_tokens",
        "output_tokens",
        "steps",
        "tokens_per_step",
        "drafted_per_step",
        "acceptance_rate",
        "insert_us_per_token",
        "extend_us_per_token",
        "index_bytes_per_token",
        "live_bytes",
        "segment_bytes",
        "build_tokens_per_s",
        "wall_s",
    ];
    for key in numbers {
        assert!(report[key].is_number(), "{key}: {}", report[key]);
    }
    for key in ["mean", "p50", "p99"] {
        assert!(report["propose_us"][key].is_number(), "{key}");
    }
    assert_eq!(report["sources"]["global"]["accepted"], 11);
    assert_eq!(
        report["settings"]["sources"],
        json!(["request", "group", "global"])
    );
    assert_eq!(report["settings"]["max_spec_tokens"], 128);
    Ok(())
}

#[test]
fn invalid_settings_are_refused_and_lines_left_out() -> anyhow::Result<()> {
    let calls = [
        json!({"output_token_ids": [1]}),
        json!({"output_token_ids": "two"}),
    ];
    for (args, wanted) in [
        ("--concurrency 0", "--concurrency must be at least 1"),
        ("--max-pattern 0", "--max-pattern must be at least 1"),
        ("--alpha nan", "must be `auto` or a number"),
        ("--preset sam --tree", "cannot be used with"),
        (
            "--preset sam --alpha 2",
            "only --max-spec-tokens changes the presets sam and pld",
        ),
        ("--sweep beta=1", "beta is none of alpha"),
        ("--preset lookahead", "invalid value 'lookahead'"),
        ("--sources local", "invalid value 'local'"),
        ("--linear --tree", "cannot be used with"),
        ("--linear --paths 2", "cannot be used with"),
        ("--paths 0", "--paths must be at least 1"),
        (
            "--warm no/such/file",
            "no/such/file: the trace cannot be read",
        ),
        ("--tokenizer no/such/file", "no/such/file"),
    ] {
        let error = match replay(&calls, args) {
            Ok(_) => panic!("{args} was accepted"),
            Err(error) => format!("{error:#}"),
        };
        assert!(error.contains(wanted), "{args}: {error}");
    }
    // A faulty line is left out and told, unless the limit ends the reading before it.
    assert_eq!(replay(&calls, "--docs 1")?.docs, 1);
    let report = replay(&calls, "--warm WARM")?;
    assert_eq!((report.docs, report.warm_tokens), (1, 1));
    for log in [&report.log, &report.warm_log] {
        let [left] = &log.left_out[..] else {
            panic!("{log:?}");
        };
        assert!(left.first.ends_with("calls.jsonl, line 2"), "{log:?}");
    }
    assert_eq!(report.table().matches("Left out: ").count(), 2);
    Ok(())
}

#[test]
fn progress_comes_after_every_call() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path: PathBuf = folder.path().join("calls.jsonl");
    std::fs::write(&path, "{\"output_token_ids\":[1,2]}\n".repeat(4))?;
    let args = [
        "replay",
        path.to_str().expect("a path in UTF-8"),
        "--docs",
        "4",
    ];
    let mut seen = Vec::new();
    run(&Cli::try_parse_from(args)?.options, |progress| {
        seen.push(progress);
    })?;
    let docs: Vec<u64> = seen.iter().map(|progress| progress.docs).collect();
    assert_eq!(docs, [1, 2, 3, 4]);
    let last = seen.last().expect("there are four");
    assert_eq!((last.output_tokens, last.share), (8, 1.0));
    Ok(())
}
