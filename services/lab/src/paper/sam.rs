//! SAM decoding (arXiv 2411.10666), and its use for rollouts on Ascend (cann-recipes-train).

use super::experiment::{Experiment, Paper};
use super::generated::Kind;
use super::input::Input;
use super::needs::Needs;
use super::replays::{Case, Replays};
use super::report::{Cell, Column, Findings, Row};
use super::rollouts::{cell, ratio, workloads};
use crate::replay::{Breakdown, LengthRow, Policy};

pub(super) const PAPER: Paper = Paper {
    title: "SAM decoding",
    version: "arXiv 2411.10666, and cann-recipes-train",
    experiments: &[
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

/// The article's rollouts draft three tokens, from the request alone.
const OF_THE_ARTICLE: &str = "--drafts request --draft-rules fixed --draft-tokens 3";

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
    Ok(Findings::new(
        "output before, tokens",
        &[
            Column::measured("steps", 0),
            Column::measured("tokens per step", 2),
            Column::measured("acceptance", 3).drawn(),
        ],
        rows,
        ("output tokens before the step", "acceptance"),
        "Drafts of three tokens from the request's own text, as in the article.",
    ))
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
    Ok(Findings::new(
        "drafts",
        &[
            Column::published("gain, %", 2).drawn(),
            Column::measured("gain, %", 2).drawn(),
            Column::published("tail, times as fast", 2),
            Column::measured("tail, times as fast", 2),
            Column::measured("accepted per step", 2),
        ],
        rows,
        ("", "gain, %"),
        "Rollouts without a scheduler, with drafts of three tokens from the request's own text. The article's \
             workload is none of these: a Qwen3-32B trained with DAPO.",
    ))
}
