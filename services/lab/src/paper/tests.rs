//! Each experiment on few calls: it runs, and shows what it has to.

use super::needs::Needs;
use super::replays::parsed;
use super::report::Findings;
use super::*;

fn options(words: &str) -> PaperOptions {
    parsed(words).expect("the options are read")
}

fn report(words: &str) -> PaperReport {
    run(&options(words)).expect("it runs")
}

/// The means of a column that is not the paper's, row by row.
fn measured(report: &PaperReport, name: &str) -> Vec<f64> {
    let columns = &report.findings.columns;
    let at = columns
        .iter()
        .position(|column| column.name == name && !column.is_published)
        .expect("the column");
    let rows = report.findings.rows.iter();
    rows.map(|row| row.cells[at].expect("a figure").mean)
        .collect()
}

#[test]
fn every_experiment_has_rows_and_a_picture() -> anyhow::Result<()> {
    let listed = list();
    for experiment in PAPERS.iter().flat_map(|paper| paper.experiments) {
        assert!(listed.contains(experiment.name));
        // Simulations of rollouts take longest.
        let size = match experiment.needs {
            Needs::Rollouts => "--docs 8 --seeds 1",
            _ => "--docs 24 --seeds 2",
        };
        let report = report(&format!("{} {size}", experiment.name));
        let Findings { columns, rows, .. } = &report.findings;
        assert!(!rows.is_empty(), "{}", experiment.name);
        for row in rows {
            assert_eq!(row.cells.len(), columns.len(), "{}", experiment.name);
        }
        assert!(columns.iter().any(|column| column.is_drawn));
        let table = report.table();
        assert!(
            table.contains(experiment.claim) && table.contains("generated")
                || table.contains("drawn")
        );
        let page = picture::html(&report)?;
        assert!(page.contains("<svg") && page.ends_with("</html>\n"));
        let json = serde_json::to_value(&report)?;
        assert_eq!(json["rows"].as_array().map(Vec::len), Some(rows.len()));
        assert!(json["settings"]["seeds"].is_u64());
    }
    Ok(())
}

#[test]
fn longer_matches_bring_more() {
    let of = report("suffixdecoding-figure-2a --seeds 1 --docs 120");
    let accepted = measured(&of, "accepted per step");
    assert!(accepted.len() > 4, "{accepted:?}");
    assert!(accepted[3] > 2.0 * accepted[0], "{accepted:?}");
}

#[test]
fn both_trees_are_better_than_either() {
    let of = report("suffixdecoding-figure-7 --seeds 1 --docs 80");
    let both = measured(&of, "both");
    for other in ["tokens: request", "all outputs"] {
        for (both, other) in both.iter().zip(measured(&of, other)) {
            assert!(*both > 0.98 * other, "{both} {other}");
        }
    }
}

#[test]
fn known_outputs_of_the_workload_bring_speed() {
    for name in ["suffixdecoding-figure-8", "suffixdecoding-figure-9"] {
        let of = report(&format!("{name} --seeds 1 --docs 300"));
        let speedups = measured(&of, "speed-up");
        let (first, last) = (speedups[0], speedups[speedups.len() - 1]);
        assert!(last > 1.1 * first, "{name}: {speedups:?}");
    }
}

#[test]
fn tau_decides_how_often_the_head_drafts() {
    let of = report("suffixdecoding-table-4 --seeds 2 --docs 60");
    let shares = measured(&of, "steps of the head");
    assert_eq!(shares[0], 0.0);
    assert!(
        shares.windows(2).all(|pair| pair[0] <= pair[1]),
        "{shares:?}"
    );
}

#[test]
fn open_text_has_more_entropy_than_agents() {
    let of = report("suffixdecoding-table-1 --seeds 1 --docs 100");
    let names: Vec<&str> = of.findings.rows.iter().map(|row| &*row.name).collect();
    let place = |name: &str| names.iter().position(|row| *row == name);
    assert!(
        place("generated agents") < place("generated open text"),
        "{names:?}"
    );
}

#[test]
fn finished_samples_and_paths_bring_tokens() {
    let of = report("seer-table-2 --seeds 1 --docs 400");
    let (one, four) = (measured(&of, "1 path"), measured(&of, "4 paths"));
    assert_eq!(one.len(), 4);
    assert!(one.windows(2).all(|pair| pair[0] < pair[1]), "{one:?}");
    assert!(four[3] > one[3], "{one:?} {four:?}");
}

#[test]
fn what_cannot_be_run_is_refused() {
    let refused = |words: &str| format!("{:#}", run(&options(words)).expect_err(words));
    for (words, wanted) in [
        (
            "suffixdecoding-figure-3",
            "there is no experiment \"suffixdecoding-figure-3\"",
        ),
        ("sam-length --seeds 0", "--seeds must be from 1 to 1000"),
        ("sam-length --docs 0", "--docs must be at least 1"),
        (
            "sam-length no/such/file",
            "no/such/file: the trace cannot be read",
        ),
    ] {
        let error = refused(words);
        assert!(error.contains(wanted), "{words}: {error}");
    }
}

#[test]
fn recorded_calls_are_used_if_they_are_named() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("calls.jsonl");
    let line = |nth: u32| {
        let output: Vec<u32> = (nth % 3..40).collect();
        format!(
            "{{\"workload\":\"w{}\",\"output_token_ids\":{output:?}}}\n",
            nth % 2
        )
    };
    std::fs::write(&path, (0..20).map(line).collect::<String>())?;
    let path = path.to_str().expect("a path in UTF-8");
    let of = report(&format!("suffixdecoding-figure-7 {path}"));
    let names: Vec<&str> = of.findings.rows.iter().map(|row| &*row.name).collect();
    assert_eq!(names, ["w0", "w1"]);
    // Nothing is drawn, so there is one seed and no range.
    assert!(of.findings.rows[0].cells[2].is_some_and(|cell| cell.range.is_none()));
    assert_eq!(of.data, path);
    let error = run(&options(&format!("suffixdecoding-figure-9 {path}"))).expect_err("no other");
    assert!(
        format!("{error:#}").contains("name them with --warm"),
        "{error:#}"
    );
    let error = run(&options(&format!("seer-table-2 {path}"))).expect_err("no groups");
    assert!(
        format!("{error:#}").contains("the calls have no groups"),
        "{error:#}"
    );
    Ok(())
}
