//! Analyses of small generated logs.

use clap::Parser;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::*;

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
    for call in 0..60 {
        let song = open(1000, 120);
        calls.push(json!({"workload": "songs", "output_token_ids": song}));
        calls.push(json!({"workload": "news", "output_token_ids": open(call, 90)}));
        calls.push(json!({"workload": "songs", "tenant": "t", "output_token_ids": song}));
    }
    calls
}

/// Calls whose words are as frequent as those of prose: the word of rank n has a share of about 1 / n. Their order is
/// free, so hardly more than pairs of frequent words repeats.
fn prose() -> Vec<Value> {
    let word = |at: u64| {
        let uniform = (xxh3_64(&at.to_le_bytes()) >> 11) as f64 / (1u64 << 53) as f64;
        8000f64.powf(uniform) as u32
    };
    let text = |call: u64| (0..120).map(|at| word(120 * call + at)).collect::<Vec<_>>();
    (0..100)
        .map(|call| json!({"workload": "prose", "output_token_ids": text(call)}))
        .collect()
}

fn estimate(row: &WorkloadReport, concurrency: usize) -> f64 {
    let speed = row.speed(concurrency).expect("there is enough data");
    speed.decoding.expect("there were steps").estimate
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
            ("songs", 60, 7200, Verdict::Yes),
            ("news", 60, 5400, Verdict::No),
            ("songs / t", 60, 7200, Verdict::Yes)
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
        assert!(estimate(songs, concurrency) > 3.0);
        assert!((0.97..1.03).contains(&estimate(news, concurrency)));
    }
    assert!(songs.origins.others > 0.9, "{:?}", songs.origins);
    assert_eq!(news.origins.new, 1.0);
    let per_token = songs.index_bytes_per_token.expect("there are tokens");
    assert!(per_token > 4.0 && per_token < 200.0, "{per_token}");
    let month = report.month_bytes.expect("there are tokens");
    let tokens = 1000.0 * 30.0 * 86_400.0;
    assert!((4.0..200.0).contains(&(month / tokens)), "{month}");
    // The whole log has a third of its calls without a gain.
    assert_eq!(
        (report.docs, report.sessions, report.units),
        (180, 180, 180)
    );
    let all = report.speeds[0].decoding.expect("there were steps");
    assert!(
        all.estimate > 1.3 && all.estimate < estimate(songs, 1),
        "{all:?}"
    );
    assert!(all.low < all.estimate && all.estimate < all.high, "{all:?}");
    Ok(())
}

#[test]
fn the_answer_comes_first_and_alphas_are_compared() -> anyhow::Result<()> {
    let songs: Vec<Value> = calls().into_iter().step_by(3).collect();
    let report = analyze(&songs, "--concurrency 1,16")?;
    let table = report.table();
    assert!(
        table.starts_with("Yes: ") && table.contains("8B on an H100, 16 at once"),
        "{table}"
    );
    assert!(
        table.contains("most from text repeated between sessions"),
        "{table}"
    );
    assert!(
        table.contains("2, 4, 8, 16 were tried at 16 requests"),
        "{table}"
    );
    assert!(table.contains("the log has no prompts"), "{table}");
    let choice = &report.rows[0].alpha;
    assert_eq!(choice.concurrency, 16);
    // A song is one long copy: the longer drafts may be, the fewer steps it takes.
    let goodput = |at: usize| choice.fixed[at].goodput_tokens_per_s.expect("steps");
    assert!(goodput(0) < goodput(3), "{choice:?}");
    assert_eq!(choice.is_fixed(), choice.gain.expect("steps") > 0.01);
    // The first song is decoded token by token, and whoever remembers it skips most steps.
    let speedups: Vec<f64> = report
        .memory
        .iter()
        .filter_map(|point| point.speedup)
        .collect();
    assert_eq!(report.memory[0].tokens, 0);
    assert_eq!(report.memory[3].tokens, 45 * 120);
    assert!(speedups[0] + 0.1 < speedups[3], "{speedups:?}");
    Ok(())
}

#[test]
fn the_share_of_prompts_is_part_of_a_call() -> anyhow::Result<()> {
    let mut calls: Vec<Value> = calls().into_iter().step_by(3).collect();
    for (at, call) in calls.iter_mut().enumerate() {
        call["prompt_token_ids"] = json!(open(at as u32 % 7, 3000));
        call["session"] = json!(format!("{}", at % 10));
        call["created_ms"] = json!(at * 60_000);
        call["duration_ms"] = json!(1200);
    }
    let report = analyze(&calls, "--concurrency 4 --engine-model h100-8b,l4-8b")?;
    let [first, second] = &report.speeds[..] else {
        panic!("a speed for each model")
    };
    assert_eq!(
        (&*first.engine_model, &*second.engine_model),
        ("h100-8b", "l4-8b")
    );
    let share = first
        .decoding_share_without_reuse
        .expect("there are prompts");
    assert!((0.01..0.95).contains(&share), "{share}");
    assert!(first.decoding_share >= first.decoding_share_without_reuse);
    let (decoding, whole) = (
        first.decoding.expect("steps"),
        first.whole_call.expect("steps"),
    );
    assert!(whole.estimate > 1.0 && whole.estimate < decoding.estimate);
    assert_eq!(report.sessions, 10);
    // The log says how many tokens come in a second, and how long calls take.
    assert_eq!(report.span_s, Some(59.0 * 60.0));
    assert!((report.tokens_per_s - 7200.0 / 3540.0).abs() < 1e-9);
    assert!(
        report.table().contains("10.0 ms per output token"),
        "{}",
        report.table()
    );
    // Most of the calls say when their first token came. The others were not streamed.
    for (at, call) in calls.iter_mut().enumerate() {
        call["first_ms"] = json!(if at % 3 == 0 { 1199 } else { 900 });
    }
    let report = analyze(&calls, "--concurrency 4")?;
    let [measured] = &report.speeds[..] else {
        panic!("one speed")
    };
    assert_eq!(measured.decoding_share, Some(0.25));
    assert_eq!(measured.decoding_share_calls, 40);
    assert_eq!(measured.decoding_share_without_reuse, None);
    let gain = decoding.estimate;
    let expected = 1.0 / (0.75 + 0.25 / gain);
    let whole = measured.whole_call.expect("a share").estimate;
    assert!((whole - expected).abs() < 1e-6, "{whole} {expected}");
    let said = report.table();
    for wanted in [
        "Decoding takes 25 % of a call's time, measured in 40 calls of the log.",
        "25 % measured",
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    // A few such calls say little of the others.
    for call in calls.iter_mut().skip(20) {
        call["first_ms"] = Value::Null;
    }
    let report = analyze(&calls, "--concurrency 4")?;
    assert_eq!(report.speeds[0].decoding_share_calls, 0);
    assert_eq!(report.speeds[0].decoding_share, first.decoding_share);
    Ok(())
}

#[test]
fn little_data_gives_no_figure_and_many_calls_a_named_sample() -> anyhow::Result<()> {
    let report = analyze(&calls()[..9], "--concurrency 2")?;
    assert_eq!(report.answer.verdict, Verdict::TooLittleData);
    assert!(report.speeds.is_empty() && report.memory.is_empty());
    assert!(
        report.table().starts_with("Too little data"),
        "{}",
        report.table()
    );
    assert!(!report.table().contains("x to "), "{}", report.table());
    assert!(html(&report).contains("Too little data"));
    let report = analyze(&calls(), "--docs 150 --concurrency 2")?;
    assert!(
        report
            .rows
            .iter()
            .all(|row| row.docs_read == 60 && (40..=60).contains(&row.docs))
    );
    assert_eq!((report.docs, report.tokens_read), (150, 19_800));
    assert!(
        report.table().contains("150 of 180 calls, whole sessions"),
        "{}",
        report.table()
    );
    Ok(())
}

#[test]
fn the_report_has_all_of_it() -> anyhow::Result<()> {
    let files = refrain_tokenization::testing::byte_level_files();
    let tokenizer = files.tokenizer()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, files.tokenizer_json)?;
    let words = tokenizer.encode("The <b>lamp</b> in the hall is on, and nobody is at home. ")?;
    let mut calls: Vec<Value> = calls().into_iter().step_by(3).collect();
    for call in &mut calls {
        call["output_token_ids"] = json!([&words[..], &words[..], &open(3, 40)].concat());
    }
    calls.push(json!({"workload": "<script>alert(1)</script>", "output_token_ids": []}));
    let args = format!("--concurrency 2 --tokenizer {}", file.display());
    let report = analyze(&calls, &args)?;
    let json = serde_json::to_value(&report)?;
    for key in [
        "/answer/sentence",
        "/answer/verdict",
        "/answer/next/0",
        "/speeds/0/decoding/low",
        "/speeds/0/ngram",
        "/speeds/0/head",
        "/memory/3/speedup",
        "/origins/call",
        "/passages/0/parts/0/1",
        "/rows/0/name",
        "/rows/0/entropy_bits",
        "/rows/0/alpha/fixed/0/goodput_tokens_per_s",
        "/rows/0/index_bytes_per_token",
        "/tokens_per_s",
        "/month_bytes",
        "/version",
    ] {
        assert!(
            json.pointer(key).is_some_and(|value| !value.is_null()),
            "{key}"
        );
    }
    // A workload without an output has no entropy.
    assert_eq!(json["rows"][1]["entropy_bits"], Value::Null);
    let report = AnalyzeReport {
        date: "2026-11-30".into(),
        command: "refrain analyze <log>".into(),
        ..report
    };
    let page = html(&report);
    assert_eq!(page.matches("<svg").count(), 3);
    assert!(page.contains("&lt;b&gt;lamp&lt;/b&gt;") && page.contains("<mark class=\"call\">"));
    assert!(page.contains("2026-11-30, Refrain") && page.contains("refrain analyze &lt;log&gt;"));
    assert!(page.ends_with("</html>\n"));
    assert!(
        !page.contains("<script") && !page.contains("http"),
        "{page}"
    );
    let private = analyze(&calls, &format!("{args} --private"))?;
    assert!(private.passages.is_empty());
    assert!(!html(&private).contains("&lt;b&gt;"));
    Ok(())
}

#[test]
fn prose_gets_a_no() -> anyhow::Result<()> {
    let report = analyze(&prose(), "--concurrency 16")?;
    assert_eq!(report.answer.verdict, Verdict::No, "{}", report.table());
    assert!(
        report.answer.sentence.starts_with("No: "),
        "{}",
        report.answer.sentence
    );
    Ok(())
}

#[test]
fn equal_values_are_tried_once_and_progress_reaches_the_end() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("calls.jsonl");
    let lines: Vec<String> = (0..10)
        .map(|row| json!({"workload": format!("w{row}"), "output_token_ids": [1]}).to_string())
        .collect();
    std::fs::write(&path, lines.join("\n"))?;
    let path = path.to_str().expect("a path in UTF-8");
    let args = ["analyze", path, "--concurrency", "1,1", "--rows", "8"];
    let mut last = ReplayProgress::default();
    let report = run(&Cli::try_parse_from(args)?.options, |progress| {
        last = progress;
    })?;
    assert!((last.share - 1.0).abs() < 1e-9, "{last:?}");
    assert_eq!(report.settings.concurrency, [1]);
    assert_eq!((report.rows.len(), &*report.rows[8].name), (9, "(others)"));
    Ok(())
}

#[test]
fn an_engine_with_a_head_gains_on_text_that_does_not_repeat() -> anyhow::Result<()> {
    let report = analyze(&calls(), "--concurrency 1 --eagle3 acc=0.8,0.8,0.8")?;
    let news = estimate(&report.rows[1], 1);
    assert!(news > 1.5, "{news}");
    assert!(!report.table().contains("assumption"), "{}", report.table());
    Ok(())
}

/// The log of an agent that the README names.
#[test]
fn the_log_of_an_agent_is_analyzed() -> anyhow::Result<()> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for tokenizer in ["", "--tokenizer services/reference-engine/model"] {
        let tokenizer = tokenizer.replace("services", &format!("{root}/services"));
        let analyzed = |args: &str| {
            let args = format!("analyze {root}/examples/agent.jsonl {args} {tokenizer}");
            run(
                &Cli::try_parse_from(args.split_whitespace())?.options,
                |_| {},
            )
        };
        let report = analyzed("--concurrency 16")?;
        assert_eq!(
            report.answer.verdict,
            Verdict::Yes,
            "{}",
            report.answer.sentence
        );
        assert_eq!(report.rows[0].tenant.as_deref(), Some("garden-shop"));
        assert_eq!((report.docs_read, report.docs), (75, 75));
        let log = &report.log;
        assert_eq!((log.calls, log.left_out.len()), (75, 0), "{log:?}");
        assert_eq!(log.has_approximate_tokens, tokenizer.is_empty());
        assert!(!report.passages.is_empty());
        // Calls that are not in the sample are counted, and their tokens estimated.
        let sampled = analyzed("--concurrency 1 --docs 60")?;
        assert_eq!((sampled.docs_read, sampled.log.calls), (75, 75));
        assert!((1..=60).contains(&sampled.docs), "{}", sampled.docs);
        assert!(sampled.log.output_tokens_estimated > 0);
    }
    Ok(())
}

#[test]
fn invalid_settings_are_refused() {
    let bad = [json!({"output_token_ids": [1]}), json!({"output": "two"})];
    for (args, wanted) in [
        ("--concurrency 0", "--concurrency must be at least 1"),
        ("--docs 0", "--docs must be at least 1"),
        ("--sample-tokens 0", "--sample-tokens must be at least 1"),
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
