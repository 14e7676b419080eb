//! Analyses of small generated logs.

use clap::Parser;
use refrain_speculation::draft::Setting;
use serde_json::{Value, json};

use super::experiments::POLICIES;
use super::*;
use crate::replay::Policy;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: AnalyzeOptions,
}

/// Writes the calls to a file and analyzes it with these arguments.
fn analyze(calls: &[Value], args: &str) -> anyhow::Result<AnalyzeReport> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("calls.jsonl");
    let lines: Vec<String> = calls.iter().map(Value::to_string).collect();
    std::fs::write(&path, lines.join("\n"))?;
    let path = path.to_str().expect("a path in UTF-8");
    let args = ["analyze", path].into_iter().chain(args.split_whitespace());
    run(&Cli::try_parse_from(args)?.options, |_| {})
}

/// Tokens without repetition, the same in every run.
fn open(call: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|at| (call * 7919 + at * 104_729) % 50_021)
        .collect()
}

/// One workload repeats the same output, the other never repeats; a second tenant has the first output as well.
fn calls() -> Vec<Value> {
    let mut calls = Vec::new();
    for call in 0..30 {
        calls.push(json!({"workload": "songs", "output_token_ids": open(1000, 60)}));
        calls.push(json!({"workload": "news", "output_token_ids": open(call, 40)}));
        calls.push(json!({"workload": "songs", "tenant": "t", "output_token_ids": open(1000, 60)}));
    }
    calls
}

#[test]
fn workloads_and_tenants_have_rows_of_their_own() -> anyhow::Result<()> {
    let report = analyze(&calls(), "--concurrency 1,4 --tokens-per-s 1000")?;
    let rows: Vec<_> = report
        .rows
        .iter()
        .map(|row| (row.name.as_str(), row.docs, row.output_tokens, row.helps))
        .collect();
    assert_eq!(
        rows,
        [
            ("songs", 30, 1800, "yes"),
            ("news", 30, 1200, "hardly"),
            ("songs / t", 30, 1800, "yes")
        ]
    );
    let [songs, news, _] = &report.rows[..] else {
        panic!("three rows")
    };
    assert!(
        songs.entropy_bits < news.entropy_bits,
        "{:?}",
        news.entropy_bits
    );
    for concurrency in [1, 4] {
        let of = |row: &WorkloadReport| row.speedup(Policy::Goodput, concurrency).expect("steps");
        assert!(
            of(songs) > 3.0 && of(news) > 0.97,
            "{} {}",
            of(songs),
            of(news)
        );
    }
    // The first output is decoded token by token. All others take one such step, one with 15 draft tokens for a match
    // of one, since there is a single request, and one with the remaining 43.
    let suffix = songs
        .policies
        .iter()
        .find(|row| row.policy == Policy::Suffix);
    let steps = 60.0 + 29.0 * 3.0;
    assert_eq!(
        suffix.and_then(|row| row.tokens_per_step),
        Some(1800.0 / steps)
    );
    let month = songs.month_bytes.expect("there are tokens");
    let per_token = songs.index_bytes_per_token.expect("there are tokens");
    assert!((month / (per_token * 1000.0 * 30.0 * 86_400.0) - 1.0).abs() < 1e-12);
    assert!(per_token > 4.0 && per_token < 200.0, "{per_token}");
    assert_eq!(songs.windows.last().map(|window| window.docs), Some(30));
    Ok(())
}

#[test]
fn alphas_are_compared_by_the_goodput_of_the_same_calls() -> anyhow::Result<()> {
    let report = analyze(&calls(), "--concurrency 1,4 --alpha-docs 20")?;
    let [songs, news, _] = &report.rows[..] else {
        panic!("three rows")
    };
    for row in [songs, news] {
        let at: Vec<_> = row.alphas.iter().map(|choice| choice.concurrency).collect();
        assert_eq!(at, [1, 4]);
        for choice in &row.alphas {
            assert_eq!(choice.docs, 20);
            let best = choice.best.expect("steps").goodput_tokens_per_s;
            let most = choice.fixed.iter().map(|fixed| fixed.goodput_tokens_per_s);
            assert_eq!(
                best,
                most.fold(None, |most, next| if next > most { next } else { most })
            );
            let set = choice.gain.expect("steps") > 0.01;
            assert_eq!(choice.config_line() != "alpha = \"auto\"", set);
        }
    }
    // A song is one long copy: the longer drafts may be, the fewer steps it takes.
    let goodput = |row: &WorkloadReport, alpha| {
        let mut fixed = row.alphas[0].fixed.iter();
        let found = fixed.find(|fixed| fixed.alpha == alpha);
        found
            .and_then(|fixed| fixed.goodput_tokens_per_s)
            .expect("steps")
    };
    assert!(goodput(songs, 1.0) < 0.9 * goodput(songs, 16.0));
    // Nothing can be drafted for news, so no alpha matters.
    assert_eq!(goodput(news, 1.0), goodput(news, 32.0));
    assert_eq!(news.alphas[0].recommended, Setting::Auto);
    let table = report.table();
    assert!(table.contains("1, 2, 4, 8, 16, 32 were tried"), "{table}");
    assert!(table.contains("at most the first 20 calls"), "{table}");
    // All calls of a row: `auto` is the row's own goodput.
    let report = analyze(&calls(), "--concurrency 1")?;
    let songs = &report.rows[0];
    let own = songs
        .policies
        .iter()
        .find(|row| row.policy == Policy::Goodput);
    assert_eq!(songs.alphas[0].docs, 30);
    assert_eq!(
        songs.alphas[0].auto_tokens_per_s,
        own.and_then(|row| row.goodput_tokens_per_s)
    );
    Ok(())
}

#[test]
fn the_output_has_every_row() -> anyhow::Result<()> {
    let mut calls = calls();
    calls.truncate(6);
    calls.push(json!({"workload": "<script>alert(1)</script>", "output_token_ids": []}));
    let report = analyze(&calls, "--docs 1 --concurrency 2")?;
    let row = &report.rows[0];
    assert_eq!((row.docs_read, row.docs, row.tokens_read), (2, 1, 120));
    let json = serde_json::to_value(&report)?;
    for key in [
        "name",
        "docs_read",
        "tokens_read",
        "docs",
        "output_tokens",
        "entropy_bits",
        "helps",
        "accepted_length",
        "policies",
        "alphas",
        "index_bytes_per_token",
        "month_bytes",
        "windows",
    ] {
        assert!(!json["rows"][0][key].is_null(), "{key}");
    }
    assert_eq!(json["rows"][0]["workload"], "songs");
    assert_eq!(json["rows"][0]["tenant"], Value::Null);
    // That workload has no output, so it has no entropy.
    assert_eq!(json["rows"][3]["entropy_bits"], Value::Null);
    let table = report.table();
    for wanted in [
        "songs / t",
        "entropy",
        "at 2",
        "GB/month",
        "best fixed",
        "alpha = ",
    ] {
        assert!(table.contains(wanted), "{wanted} is missing:\n{table}");
    }
    let page = html(&report)?;
    assert_eq!(page.matches("<svg").count(), 4);
    assert!(page.contains("songs / t") && page.ends_with("</html>\n"));
    assert!(!page.contains("<script") && !page.contains("http://localhost"));
    Ok(())
}

#[test]
fn the_page_shows_some_of_many_rows_and_progress_reaches_the_end() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("calls.jsonl");
    let lines: Vec<String> = (0..10)
        .map(|row| json!({"workload": format!("w{row}"), "output_token_ids": [1]}).to_string())
        .collect();
    std::fs::write(&path, lines.join("\n"))?;
    let path = path.to_str().expect("a path in UTF-8");
    let args = ["analyze", path, "--concurrency", "1,1"];
    let mut last = ReplayProgress::default();
    let report = run(&Cli::try_parse_from(args)?.options, |progress| {
        last = progress;
    })?;
    assert!((last.share - 1.0).abs() < 1e-9, "{last:?}");
    assert_eq!(report.rows[9].policies.len(), POLICIES.len());
    let page = html(&report)?;
    assert!(page.contains("the first 9 of 10 rows"));
    for wanted in ["prompts are left out", "at most 128 tokens"] {
        assert!(
            page.contains(wanted) && report.table().contains(wanted),
            "{wanted}"
        );
    }
    Ok(())
}

#[test]
fn an_engine_with_a_head_gains_on_text_that_does_not_repeat() -> anyhow::Result<()> {
    let report = analyze(&calls(), "--concurrency 1 --eagle3 acc=0.8,0.8,0.8")?;
    let news = report.rows[1].speedup(Policy::Goodput, 1).expect("steps");
    assert!(news > 1.5, "{news}");
    Ok(())
}

#[test]
fn invalid_settings_are_refused() {
    let bad = [json!({"output_token_ids": [1]}), json!({"output": "two"})];
    for (args, wanted) in [
        (
            "",
            "calls.jsonl, line 2: output is text: name the tokenizer.json with --tokenizer",
        ),
        ("--concurrency 0", "--concurrency must be at least 1"),
        ("--docs 0", "--docs must be at least 1"),
        ("--alpha-docs 0", "--alpha-docs must be at least 1"),
        ("--rows 0", "--rows must be at least 1"),
        ("--tokens-per-s 0", "--tokens-per-s must be more than 0"),
        ("--engine-model no/such", "neither a preset"),
        ("--tokenizer no/such/file", "no/such/file"),
    ] {
        let error = match analyze(&bad, args) {
            Ok(_) => panic!("{args} was accepted"),
            Err(error) => format!("{error:#}"),
        };
        assert!(error.contains(wanted), "{args}: {error}");
    }
}
