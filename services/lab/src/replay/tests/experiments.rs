//! The options of a replay for experiments: breakdowns, changed presets, fewer warm calls, and sweeps.

use serde_json::json;

use super::*;

#[test]
fn drafts_are_counted_by_their_match_and_by_their_position() -> anyhow::Result<()> {
    let calls = [
        json!({"output_token_ids": song()}),
        json!({"output_token_ids": song()}),
    ];
    let report = replay(&calls, "--sources global --by match-length,position")?;
    let rows = |what| -> Vec<(String, u64, Option<f64>)> {
        let rows = report.by[&what].iter();
        let row = |row: &LengthRow| (row.range(), row.steps, row.accepted_per_step);
        rows.map(row).collect()
    };
    let row = |range: &str, steps, accepted| (range.to_owned(), steps, Some(accepted));
    // The second copy has drafts of patterns of 1, 3 and 7 tokens, all of which are accepted.
    assert_eq!(
        rows(Breakdown::MatchLength),
        [
            row("1", 1, 1.0),
            row("2 to 3", 1, 3.0),
            row("4 to 7", 1, 7.0)
        ]
    );
    // These are made after 1, 3 and 7 tokens; the first copy has a step at each position.
    assert_eq!(
        rows(Breakdown::Position),
        [
            row("0", 2, 0.0),
            row("1", 2, 0.5),
            row("2 to 3", 3, 1.0),
            row("4 to 7", 5, 1.4),
            row("8 to 15", 7, 0.0)
        ]
    );
    assert!(report.table().contains("\nmatch, tokens "));
    Ok(())
}

#[test]
fn presets_take_the_changes_that_they_know() -> anyhow::Result<()> {
    let calls = [json!({"output_token_ids": song()})];
    for (args, steps) in [
        // Patterns of 1, 2, 4 and 8 tokens draft one token less than they have.
        ("--preset paper --sources global", 5),
        // Patterns of 1, 3 and 9 tokens.
        ("--preset paper --sources global --alpha 2", 4),
        ("--preset paper --sources global --alpha 2 --linear", 4),
        // One token for every pattern.
        ("--preset paper --sources global --alpha 0 --offset 1", 8),
        ("--preset paper --sources group", 15),
        ("--preset paper --sources request", 15),
    ] {
        let report = replay(&calls, &format!("{args} --warm WARM --frozen"))?;
        assert_eq!(report.steps, steps, "{args}");
    }
    let calls = [json!({"prompt_token_ids": song(), "output_token_ids": song()})];
    for (args, steps) in [
        ("--preset sam", 2),
        ("--preset sam --max-spec-tokens 3", 5),
        ("--preset pld --max-spec-tokens 4", 4),
    ] {
        assert_eq!(replay(&calls, args)?.steps, steps, "{args}");
    }
    let error = format!(
        "{:#}",
        replay(&calls, "--preset pld --linear").expect_err("no tree")
    );
    assert!(error.contains("only --max-spec-tokens changes"), "{error}");
    Ok(())
}

#[test]
fn large_batches_draft_nothing_if_that_is_wanted() -> anyhow::Result<()> {
    let call = |session: &str| json!({"session": session, "output_token_ids": song()});
    let calls = [call("a"), call("b"), call("b")];
    let args = "--sources global --warm WARM --frozen --concurrency 2";
    assert_eq!(replay(&calls, args)?.steps, 4 + 4 + 4);
    // The third call runs alone.
    let args = format!("{args} --off-above-batch 1");
    assert_eq!(replay(&calls, &args)?.steps, 15 + 15 + 4);
    Ok(())
}

#[test]
fn a_sweep_has_a_row_for_each_value() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let call = json!({"output_token_ids": song()});
    let path = write(folder.path(), "calls.jsonl", &[call.clone(), call])?;
    let sweep = |words: &str| -> anyhow::Result<SweepReport> {
        let args = format!("replay {path} --warm {path} --frozen --sources global {words}");
        let options = Cli::try_parse_from(args.split_whitespace())?.options;
        let sweep = options.sweep.as_ref().expect("it is named");
        SweepReport::run(sweep, &options, |options, _| run(options, |_| {}))
    };
    let steps = |report: &SweepReport| -> Vec<u64> {
        report.rows.iter().map(|row| row.report.steps).collect()
    };
    let report = sweep("--min-token-prob 0 --alpha 1 --sweep warm-docs=0..2")?;
    assert_eq!(steps(&report), [30, 8, 8]);
    assert!(report.table().starts_with("warm-docs  tokens per step"));
    let report = sweep("--min-token-prob 0 --sweep alpha=0,1")?;
    assert_eq!(steps(&report)[1], 8);
    let report = sweep("--policies off,suffix --sweep seed=1,2")?;
    let table = report.table();
    assert!(
        table.contains("suffix, speed-up") && table.contains("\nmean "),
        "{table}"
    );
    Ok(())
}
