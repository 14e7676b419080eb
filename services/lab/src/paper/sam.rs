//! SAM decoding (arXiv 2411.10666), and its use for rollouts on Ascend (cann-recipes-train).

use super::generated::Kind;
use super::input::Input;
use super::replays::{COLUMNS, Case, Replays};
use super::report::{Cell, Column, Findings, Row};
use super::rollouts::{cell, ratio, workloads};
use super::{Experiment, Needs, Paper};
use crate::replay::{Breakdown, LengthRow, Policy};

pub(super) const PAPER: Paper = Paper {
    title: "SAM decoding",
    version: "arXiv 2411.10666, and cann-recipes-train",
    experiments: &[
        Experiment::new(
            "sam-systems",
            "the table of Spec-Bench",
            "SAM, prompt lookup, and SAM with a head",
            "SAM alone brings 1.84 times the speed of plain decoding, prompt lookup 1.56, and SAM beside a head \
                    more than the head alone.",
            Needs::Calls,
            systems,
        ),
        Experiment::new(
            "sam-length",
            "the article on rollouts",
            "Acceptance by the length of the output so far",
            "The longer the text, the more is accepted, since drafts come from the request's own text.",
            Needs::Calls,
            length,
        ),
        Experiment::new(
            "sam-switch",
            "the article on rollouts",
            "Drafts in small batches only",
            "With drafts in steps of at most 8 requests a rollout of Qwen3-32B had a gain of 9.64 %, and its tail \
                    was 1.35 times as fast.",
            Needs::Rollouts,
            switch,
        ),
    ],
};

/// Spec-Bench with Vicuna-7B on an A6000: speed-up and tokens per step. The head of the paper is EAGLE-2.
const SYSTEMS: [(&str, f64, f64); 4] = [
    ("prompt lookup", 1.56, 1.75),
    ("SAM", 1.84, 2.30),
    ("head", 2.38, 4.36),
    ("SAM and head", 2.58, 4.62),
];

/// A head that brings 4.36 tokens per step, and 2.38 times the speed.
const HEAD: &str = "acc=0.801,0.801,0.801,0.801,0.801,0.801,0.801,0.801,cost=0.104";

/// The article's rollouts draft three tokens, from the request alone.
const OF_THE_ARTICLE: &str = "--drafts request --draft-rules fixed --draft-tokens 3";

fn systems(input: &Input<'_>) -> anyhow::Result<Findings> {
    let head = format!("--eagle3 {HEAD}");
    let cases = [
        Case::new(Policy::Pld, "--eagle3 off"),
        Case::new(Policy::Sam, "--eagle3 off"),
        Case::new(Policy::Eagle3, &*head),
        Case::new(Policy::Sam, &*head),
    ];
    let calls = |seed| input.last_quarter(Kind::OpenText, seed);
    let replays = Replays::run(input, input.seeds(true), calls, &cases)?;
    let rows = SYSTEMS.iter().zip(replays.cases());
    let rows = rows.map(|((name, speedup, tokens), outcomes)| {
        let published = [Cell::exact(*speedup), Cell::exact(*tokens)];
        let cells = published.into_iter().chain(outcomes.cells());
        Row::new(*name, cells.collect())
    });
    let mut columns = vec![
        Column::published("speed-up", 2).drawn(),
        Column::published("tokens per step", 2),
    ];
    columns.extend(COLUMNS);
    Ok(Findings {
        rows_are: "system",
        columns,
        rows: rows.collect(),
        notes: vec![
            "The corpus of SAM are the first three quarters of the calls, or those of --warm. The head is simulated, \
             with the figures of EAGLE-2. Speed-ups are modelled: an H100 with an 8B model."
                .into(),
        ],
        axes: ("", "speed-up"),
    })
}

fn length(input: &Input<'_>) -> anyhow::Result<Findings> {
    let cases = [Case::new(
        Policy::Sam,
        "--preset sam --max-spec-tokens 3 --eagle3 off",
    )];
    let calls = |seed| input.after_warm(Kind::Agents, seed);
    let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
    let values: [fn(&LengthRow) -> Option<f64>; 3] = [
        |row| Some(row.steps as f64),
        |row| row.tokens_per_step,
        |row| row.acceptance_rate,
    ];
    let rows = replays
        .cases()
        .flat_map(|of| of.by(Breakdown::Position, &values));
    Ok(Findings {
        rows_are: "output before, tokens",
        columns: vec![
            Column::measured("steps", 0),
            Column::measured("tokens per step", 2),
            Column::measured("acceptance", 3).drawn(),
        ],
        rows: rows.collect(),
        notes: vec![
            "Drafts of three tokens from the request's own text, as in the article.".into(),
        ],
        axes: ("output tokens before the step", "acceptance"),
    })
}

fn switch(input: &Input<'_>) -> anyhow::Result<Findings> {
    let plain = "--policies group-fifo".to_owned();
    let always = format!("{plain} {OF_THE_ARTICLE}");
    let up_to = [8, 32, 64].map(|most| format!("{always} --off-above-batch {most}"));
    let cases: Vec<&str> = [&plain, &always]
        .into_iter()
        .chain(&up_to)
        .map(String::as_str)
        .collect();
    let names = ["always", "up to 8 requests", "up to 32", "up to 64"];
    let mut rows = Vec::new();
    for workload in workloads(input) {
        let runs = workload.simulate(input, &cases)?;
        for (name, of_case) in names.iter().zip(&runs[1..]) {
            let is_of_the_article = *name == names[1];
            let [gain, tail] = [9.64, 1.35].map(|of| Cell::exact(of).filter(|_| is_of_the_article));
            let cells = vec![
                gain,
                Cell::over(of_case.iter().zip(&runs[0]).map(|(run, plain)| {
                    Some(100.0 * (plain.makespan_s / run.makespan_s.max(1e-9) - 1.0))
                })),
                tail,
                ratio(&runs[0], of_case, |run| run.tail_s),
                cell(of_case, |run| run.accepted_per_step),
            ];
            rows.push(Row::new(format!("{}, {name}", workload.name), cells));
        }
    }
    Ok(Findings {
        rows_are: "drafts",
        columns: vec![
            Column::published("gain, %", 2).drawn(),
            Column::measured("gain, %", 2).drawn(),
            Column::published("tail, times as fast", 2),
            Column::measured("tail, times as fast", 2),
            Column::measured("accepted per step", 2),
        ],
        rows,
        notes: vec![
            "Rollouts without a scheduler, with drafts of three tokens from the request's own text. The article's \
             workload is none of these: a Qwen3-32B trained with DAPO."
                .into(),
        ],
        axes: ("", "gain, %"),
    })
}
