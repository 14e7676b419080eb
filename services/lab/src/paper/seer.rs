//! Seer (arXiv 2511.14617): drafts of a group by its references, the three steps, and figures 8 to 12.
//!
//! The figures of version 1 and of version 3 differ. Where both are known, both are shown.

use std::collections::HashMap;

use anyhow::ensure;

use super::experiment::{Experiment, Paper};
use super::generated::Kind;
use super::input::{Calls, Input};
use super::needs::Needs;
use super::replays::{Case, Replays};
use super::report::{Cell, Column, Findings, Row};
use super::rollouts::{Rollouts, cell, ratio, workloads};
use crate::logs::RecordedCall;
use crate::replay::Policy;
use crate::simulate::{Moment, RunReport};

pub(super) const PAPER: Paper = Paper {
    title: "Seer",
    version: "arXiv 2511.14617 v1 and v3",
    experiments: &[
        Experiment::new(
            "seer-table-2",
            "Table 2",
            "Tokens per step by the finished samples of the group, and by paths",
            "Drafts of 15 finished samples bring more than twice as many accepted tokens as the request's own text.",
            Needs::Groups,
            table_2,
        ),
        Experiment::new(
            "seer-steps",
            "the table of its three steps (Table 4 of v3)",
            "Throughput by step: divided rollout, context-aware order, drafts of the group",
            "Each step adds to the throughput of the baseline.",
            Needs::Rollouts,
            steps,
        ),
        Experiment::new(
            "seer-figure-8",
            "Figure 8",
            "Time of a rollout and of its tail",
            "The tail is 72 to 94 % shorter (v3), or 75 to 93 % (v1).",
            Needs::Rollouts,
            figure_8,
        ),
        Experiment::new(
            "seer-figure-9",
            "Figure 9",
            "KV in use over a rollout",
            "With divided rollouts the KV caches stay in use for longer. The baseline preempts requests at first, and later \
             leaves them idle.",
            Needs::Rollouts,
            figure_9,
        ),
        Experiment::new(
            "seer-figure-10",
            "Figure 10",
            "Throughput and tail by what the order knows of lengths",
            "Lengths of the group bring the throughput near that of true lengths, and take the tail away.",
            Needs::Rollouts,
            figure_10,
        ),
        Experiment::new(
            "seer-figure-11",
            "Figure 11",
            "Drafts without the group, and drafts of one length",
            "Drafts bring 1.30 times the throughput in v1. Where either is left out, they bring 1.19 and 1.03.",
            Needs::Rollouts,
            figure_11,
        ),
        Experiment::new(
            "seer-figure-12",
            "Figure 12",
            "Accepted tokens over a rollout",
            "Towards the end fewer requests run, more samples of a group are finished, and more is accepted.",
            Needs::Rollouts,
            figure_12,
        ),
    ],
};

/// Table 2 (v3): finished samples, and tokens per step with one, two and four paths.
const TABLE_2: [(usize, [f64; 3]); 4] = [
    (0, [1.70, 1.77, 1.85]),
    (1, [2.04, 2.14, 2.25]),
    (5, [2.32, 2.44, 2.59]),
    (15, [2.53, 2.69, 2.85]),
];

/// The three steps: v1 and v3, for Moonlight, Qwen2-VL-72B and Kimi-K2.
const STEPS: [(&str, [f64; 3], [f64; 3]); 3] = [
    ("divided", [1.27, 1.31, 1.35], [1.41, 1.42, 1.16]),
    ("and context", [1.33, 1.44, 1.47], [1.47, 1.56, 1.27]),
    ("and drafts", [1.77, 1.87, 1.77], [1.90, 2.04, 1.53]),
];

/// Figure 8 (v3): seconds of the rollout and of its tail, of veRL and of Seer.
const ROLLOUT_S: [[(f64, f64); 2]; 3] = [
    [(3910.0, 1817.0), (2181.0, 278.0)],
    [(3957.0, 2301.0), (1922.0, 123.0)],
    [(12202.0, 3144.0), (8267.0, 850.0)],
];

/// Figure 10, its model being that of Qwen2-VL: throughput and tail, each of v1 and v3.
const ORDERS: [(&str, [f64; 2], [f64; 2]); 3] = [
    ("divided", [1.31, 1.42], [0.94, 0.79]),
    ("context", [1.44, 1.56], [0.13, 0.11]),
    ("oracle", [1.51, 1.63], [0.01, 0.00]),
];

const BASELINE: &str = "--policies group-fifo";
const CONTEXT: &str = "--policies context";
const SEER: &str = "--policies context --drafts group --draft-rules mba";
const OF_4_TOKENS: &str = "--policies context --drafts group --draft-rules fixed --draft-tokens 4";

const SIMULATED: &str = "Seer's lengths are drawn and the times of steps are modelled: docs/scheduling.md says what is \
                         assumed. Drafts are by Seer's rule (MBA).";

fn table_2(input: &Input<'_>) -> anyhow::Result<Findings> {
    let first = input.calls(Kind::Samples, 1);
    let samples = groups(&first).iter().map(Vec::len).max().unwrap_or(0);
    let needed = samples.min(TABLE_2[3].0 + 1);
    ensure!(
        needed >= 2,
        "the calls have no groups: two or more calls have to name the same `group`"
    );
    let references: Vec<usize> = TABLE_2
        .iter()
        .map(|(references, _)| *references)
        .filter(|references| *references < needed)
        .collect();
    let calls = |seed| by_rounds(&input.calls(Kind::Samples, seed), needed);
    let groups = calls(1).replayed.len();
    let shapes = [
        "--linear --max-spec-tokens 8",
        "--paths 2 --max-spec-tokens 16",
        "--paths 4 --max-spec-tokens 32",
    ];
    let mut cases = Vec::new();
    for references in &references {
        for shape in shapes {
            let options = format!(
                "--eagle3 off --sources request,group --frozen --alpha 0 --offset 8 --min-token-prob 0 {shape}"
            );
            cases.push(Case::new(Policy::Suffix, options).knowing(references * groups));
        }
    }
    let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
    let cells: Vec<_> = replays.cases().map(|of| of.tokens_per_step()).collect();
    let rows = references.iter().zip(cells.chunks(shapes.len()));
    let rows = rows.map(|(references, measured)| {
        let (_, published) = TABLE_2
            .into_iter()
            .find(|(of, _)| of == references)
            .unwrap_or_default();
        let cells = published.into_iter().map(Cell::exact).zip(measured);
        let cells = cells.flat_map(|(published, measured)| [published, *measured]);
        Row::new(references.to_string(), cells.collect()).at(*references as f64)
    });
    Ok(Findings::new(
        "finished samples",
        &[
            Column::published("1 path", 2).drawn(),
            Column::measured("1 path", 2).drawn(),
            Column::published("2 paths", 2),
            Column::measured("2 paths", 2),
            Column::published("4 paths", 2).drawn(),
            Column::measured("4 paths", 2).drawn(),
        ],
        rows,
        ("finished samples", "tokens per step"),
        format!(
            "The last of the first {needed} samples of {groups} groups, with paths of 8 tokens. The paper has 20 groups \
             of Qwen2-VL-72B."
        ),
    ))
}

/// The calls by their groups, in the order in which these first occur. Other calls are left out.
fn groups(calls: &[RecordedCall]) -> Vec<Vec<&RecordedCall>> {
    let mut numbers: HashMap<(&Option<String>, &str), usize> = HashMap::new();
    let mut groups: Vec<Vec<&RecordedCall>> = Vec::new();
    for call in calls {
        let Some(group) = &call.group else { continue };
        let next = groups.len();
        let number = *numbers.entry((&call.tenant, group)).or_insert(next);
        if number == next {
            groups.push(Vec::new());
        }
        groups[number].push(call);
    }
    groups
}

/// The first samples of all groups that have so many, then the second ones and so on; the last ones are replayed.
fn by_rounds(calls: &[RecordedCall], samples: usize) -> Calls {
    let mut large = groups(calls);
    large.retain(|group| group.len() >= samples);
    let round = |nth: usize| {
        large
            .iter()
            .filter_map(move |group| group.get(nth).copied())
    };
    let last = samples.saturating_sub(1);
    Calls {
        known: (0..last).flat_map(round).cloned().collect(),
        replayed: round(last).cloned().collect(),
    }
}

/// The published figure of a workload, if it is one of the paper's.
fn published<T>(of: &Rollouts, figure: impl Fn(usize) -> Option<T>) -> Option<T> {
    of.number.and_then(figure)
}

fn throughput(run: &RunReport) -> f64 {
    run.throughput_tokens_per_s
}

fn steps(input: &Input<'_>) -> anyhow::Result<Findings> {
    let mut rows = Vec::new();
    for workload in workloads(input) {
        let cases = [BASELINE, "--policies divided", CONTEXT, SEER];
        let runs = workload.simulate(input, &cases)?;
        for ((step, v1, v3), of_step) in STEPS.iter().zip(&runs[1..]) {
            let published = |of: &[f64; 3]| {
                published(&workload, |number| of.get(number).copied()).and_then(Cell::exact)
            };
            let cells = vec![
                published(v1),
                published(v3),
                ratio(of_step, &runs[0], throughput),
            ];
            rows.push(Row::new(format!("{}, {step}", workload.name), cells));
        }
    }
    Ok(Findings::new(
        "step",
        &[
            Column::published("v1", 2).drawn(),
            Column::published("v3", 2).drawn(),
            Column::measured("throughput", 2).drawn(),
        ],
        rows,
        ("", "throughput, relative to the baseline"),
        SIMULATED,
    ))
}

fn figure_8(input: &Input<'_>) -> anyhow::Result<Findings> {
    let mut rows = Vec::new();
    for workload in workloads(input) {
        let runs = workload.simulate(input, &[BASELINE, SEER])?;
        for (nth, system) in ["baseline", "Seer"].into_iter().enumerate() {
            let times = published(&workload, |number| Some(ROLLOUT_S.get(number)?[nth]));
            let cells = vec![
                times.and_then(|(rollout_s, _)| Cell::exact(rollout_s)),
                cell(&runs[nth], |run| run.makespan_s),
                times.and_then(|(_, tail_s)| Cell::exact(tail_s)),
                cell(&runs[nth], |run| run.tail_s),
                ratio(&runs[nth], &runs[0], |run| run.tail_s),
            ];
            rows.push(Row::new(format!("{}, {system}", workload.name), cells));
        }
    }
    Ok(Findings::new(
        "system",
        &[
            Column::published("rollout, s (v3)", 0).drawn(),
            Column::measured("rollout, s", 0).drawn(),
            Column::published("tail, s (v3)", 0).drawn(),
            Column::measured("tail, s", 0).drawn(),
            Column::measured("tail, of the baseline's", 2),
        ],
        rows,
        ("", "seconds"),
        format!("The tail is the time after nine tenths of the requests are done. {SIMULATED}"),
    ))
}

/// The course of two settings over a rollout: a row for each of them and twentieth of the time.
fn over_time(
    input: &Input<'_>,
    cases: [(&'static str, &str); 2],
    (column, axis): (&'static str, &'static str),
    value: fn(&Moment) -> f64,
) -> anyhow::Result<Findings> {
    let mut rows = Vec::new();
    let options = cases.map(|(_, options)| options);
    let of_course = Rollouts::of_course(input);
    let runs = of_course.map(|of| of.simulate(input, &options));
    for ((name, _), runs) in cases.iter().zip(runs.transpose()?.into_iter().flatten()) {
        let moments = runs.iter().map(|run| run.course.len()).min();
        for nth in 0..moments.unwrap_or(0) {
            let until = 100.0 * runs[0].course[nth].until;
            let cells = [value, |of| of.running];
            let cells = cells.map(|value| cell(&runs, |run| value(&run.course[nth])));
            let row = Row::new(format!("{name}, {until:.0} %"), cells.to_vec());
            rows.push(row.of(*name).at(until));
        }
    }
    Ok(Findings::new(
        "share of the rollout's time",
        &[
            Column::measured(column, 2).drawn(),
            Column::measured("running requests", 1),
        ],
        rows,
        ("% of the rollout's time", axis),
        format!(
            "Means over all instances and over a twentieth of the time; Qwen2-VL-72B, or the first trace. {SIMULATED}"
        ),
    ))
}

fn figure_9(input: &Input<'_>) -> anyhow::Result<Findings> {
    let cases = [("baseline", BASELINE), ("divided", "--policies divided")];
    let column = ("KV in use, share", "share of the KV caches");
    over_time(input, cases, column, |of| of.kv_share)
}

fn figure_12(input: &Input<'_>) -> anyhow::Result<Findings> {
    let cases = [("by Seer's rule", SEER), ("4 tokens", OF_4_TOKENS)];
    let column = ("accepted per step", "accepted tokens per step");
    over_time(input, cases, column, |of| of.accepted_per_step)
}

fn figure_10(input: &Input<'_>) -> anyhow::Result<Findings> {
    let mut rows = Vec::new();
    if let Some(workload) = Rollouts::of_course(input) {
        let options = ORDERS.map(|(order, ..)| format!("--policies {order}"));
        let mut cases = vec![BASELINE];
        cases.extend(options.iter().map(String::as_str));
        let runs = workload.simulate(input, &cases)?;
        for ((order, throughputs, tails), of_order) in ORDERS.iter().zip(&runs[1..]) {
            let [v1, v3] = throughputs.map(|of| published(&workload, |_| Cell::exact(of)));
            let [tail_v1, tail_v3] = tails.map(|of| published(&workload, |_| Cell::exact(of)));
            let cells = vec![
                v1,
                v3,
                ratio(of_order, &runs[0], throughput),
                tail_v1,
                tail_v3,
                ratio(of_order, &runs[0], |run| run.tail_s),
            ];
            rows.push(Row::new(*order, cells));
        }
    }
    Ok(Findings::new(
        "order",
        &[
            Column::published("v1", 2),
            Column::published("v3", 2).drawn(),
            Column::measured("throughput", 2).drawn(),
            Column::published("tail, v1", 2),
            Column::published("tail, v3", 2).drawn(),
            Column::measured("tail", 2).drawn(),
        ],
        rows,
        ("", "relative to the baseline"),
        format!(
            "Relative to the baseline; Qwen2-VL-72B, or the first trace. No drafts. {SIMULATED}"
        ),
    ))
}

fn figure_11(input: &Input<'_>) -> anyhow::Result<Findings> {
    let cases = [
        ("Seer's", SEER),
        (
            "without the group",
            "--policies context --drafts request --draft-rules mba",
        ),
        ("of one length, 4 tokens", OF_4_TOKENS),
        (
            "of one length, 8 tokens",
            "--policies context --drafts group --draft-rules fixed --draft-tokens 8",
        ),
    ];
    let mut options = vec![CONTEXT];
    options.extend(cases.map(|(_, options)| options));
    let mut rows = Vec::new();
    for workload in workloads(input) {
        let runs = workload.simulate(input, &options)?;
        for ((name, _), of_case) in cases.iter().zip(&runs[1..]) {
            let cells = vec![
                ratio(of_case, &runs[0], throughput),
                cell(of_case, |run| run.accepted_per_step),
            ];
            rows.push(Row::new(format!("{}, {name}", workload.name), cells));
        }
    }
    Ok(Findings::new(
        "drafts",
        &[
            Column::measured("throughput", 2).drawn(),
            Column::measured("accepted per step", 2).drawn(),
        ],
        rows,
        ("", "relative to no drafts"),
        format!(
            "Relative to no drafts in the same order. The paper's figures are of one workload, and those of the step \
             with drafts of Qwen2-VL-72B. {SIMULATED}"
        ),
    ))
}
