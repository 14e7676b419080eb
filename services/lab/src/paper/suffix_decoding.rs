//! SuffixDecoding (arXiv 2411.04975, version 3): figures 2, 7, 8 and 9, and tables 1 to 4.

use super::experiment::{Experiment, Paper};
use super::generated::Kind;
use super::input::{Calls, Input};
use super::needs::Needs;
use super::replays::{COLUMNS, Case, Outcomes, Replays, replay_case};
use super::report::{Cell, Column, Findings, Row};
use crate::analyze::{ENTROPY_BANDS, entropy_of_calls};
use crate::replay::{Breakdown, LengthRow, Policy};

pub(super) const PAPER: Paper = Paper {
    title: "SuffixDecoding",
    version: "arXiv 2411.04975v3",
    experiments: &[
        Experiment::new(
            "suffixdecoding-figure-2a",
            "Figure 2a",
            "Accepted tokens by the length of the match",
            "The longer the match, the more tokens are accepted.",
            Needs::Calls,
            figure_2a,
        ),
        Experiment::new(
            "suffixdecoding-figure-2b",
            "Figure 2b",
            "Drafts that grow with the match, and drafts of one length",
            "Lengths that follow the match make a better trade between acceptance and speed-up. Alphas from 1 to 4 \
                    work well for agents.",
            Needs::Calls,
            figure_2b,
        ),
        Experiment::new(
            "suffixdecoding-figure-7",
            "Figure 7",
            "Drafts from the request, from all outputs, and from both",
            "Both trees together beat either alone, on all tasks but two.",
            Needs::Calls,
            figure_7,
        ),
        Experiment::new(
            "suffixdecoding-figure-8",
            "Figure 8",
            "Speed-up by the number of known outputs",
            "From 256 to 10,000 outputs the speed-up grows, from 1.1 to 1.7, and the acceptance stays the same.",
            Needs::Calls,
            figure_8,
        ),
        Experiment::new(
            "suffixdecoding-figure-9",
            "Figure 9",
            "Another workload than the known one",
            "With the outputs of another workload the speed-up is 1.5 at once, and 2.6 with 500 of its own.",
            Needs::OtherCalls,
            figure_9,
        ),
        Experiment::new(
            "suffixdecoding-table-1",
            "Table 1",
            "Entropy of the next token by workload",
            "The less entropy, the more drafts bring. About a hundred outputs suffice to know it.",
            Needs::Calls,
            table_1,
        ),
        Experiment::new(
            "suffixdecoding-table-2",
            "Table 2",
            "Memory, and the times of additions and look-ups, by the number of known outputs",
            "The times do not grow with the tree.",
            Needs::Calls,
            table_2,
        ),
        Experiment::new(
            "suffixdecoding-table-3",
            "Table 3",
            "Hybrid with a head on open text, by tau",
            "On open text, a tau above the tokens that the head brings is best.",
            Needs::Calls,
            |input| by_tau(input, Kind::OpenText, SPEC_BENCH_HEAD, &SPEC_BENCH_SPEEDUPS),
        ),
        Experiment::new(
            "suffixdecoding-table-4",
            "Table 4",
            "Hybrid with a head on agents, by tau",
            "For agents tau 0 is best: the head is never asked.",
            Needs::Calls,
            |input| by_tau(input, Kind::Agents, AGENTIC_SQL_HEAD, &AGENTIC_SQL_SPEEDUPS),
        ),
    ],
};

/// Table 1. The paper does not say which logarithm it has.
const ENTROPIES: [(&str, f64); 10] = [
    ("AgenticSQL Extract", 0.0862),
    ("AgenticSQL Enrich", 0.171),
    ("AgenticSQL Classify", 0.738),
    ("AgenticSQL SQL2", 1.49),
    ("AgenticSQL Combine", 1.49),
    ("AgenticSQL SQL3", 1.51),
    ("AgenticSQL SQL1", 1.52),
    ("Spider", 2.50),
    ("Magicoder", 2.95),
    ("WildChat", 3.43),
];

/// Table 2: entries, millions of tokens, megabytes, and microseconds of an added and of a drafted token.
const COSTS: [(f64, f64, f64, f64, f64); 5] = [
    (1e3, 27.0, 1670.0, 3.95, 12.18),
    (5e3, 143.0, 2980.0, 4.06, 10.93),
    (1e4, 285.0, 4070.0, 4.05, 12.00),
    (1.5e4, 429.0, 5110.0, 4.07, 11.62),
    (2e4, 572.0, 6150.0, 4.04, 11.64),
];

/// Table 3, overall, by tau.
const SPEC_BENCH_SPEEDUPS: [(f64, f64); 8] = [
    (0.0, 1.66),
    (1.0, 1.80),
    (2.0, 2.03),
    (3.0, 2.13),
    (4.0, 2.25),
    (5.0, 2.37),
    (6.0, 2.31),
    (7.0, 2.50),
];

/// Table 4, overall, by tau.
const AGENTIC_SQL_SPEEDUPS: [(f64, f64); 5] = [
    (0.0, 5.35),
    (1.0, 3.95),
    (2.0, 3.80),
    (3.0, 3.22),
    (7.0, 3.66),
];

/// Heads that bring the tokens per step and the speed-up of EAGLE-3 in the tables of the appendix: 4.647 tokens and
/// 2.367 times on Spec-Bench, 3.160 and 1.623 on AgenticSQL. The costs include the larger steps that verify its
/// trees.
const SPEC_BENCH_HEAD: (f64, f64) = (0.821, 0.12);
const AGENTIC_SQL_HEAD: (f64, f64) = (0.695, 0.12);

/// The options of every replay without a head: Algorithm 1.
const ALGORITHM_1: &str = "--preset paper --eagle3 off";

fn paper(options: &str) -> Case {
    Case::new(Policy::Paper, format!("{ALGORITHM_1} {options}"))
}

const MODELLED: &str =
    "Speed-ups are modelled: an H100 with an 8B model, one request at a time, without prompts.";

fn figure_2a(input: &Input<'_>) -> anyhow::Result<Findings> {
    let calls = |seed| input.after_warm(Kind::Agents, seed);
    let cases = [paper("--alpha 4")];
    let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
    let values: [fn(&LengthRow) -> Option<f64>; 4] = [
        |row| Some(row.steps as f64),
        |row| row.drafted_per_step,
        |row| row.accepted_per_step,
        |row| row.acceptance_rate,
    ];
    let rows = replays
        .cases()
        .flat_map(|of| of.by(Breakdown::MatchLength, &values));
    Ok(Findings::new(
        "match, tokens",
        &[
            Column::measured("steps", 0),
            Column::measured("drafted per step", 2),
            Column::measured("accepted per step", 2).drawn(),
            Column::measured("acceptance", 3),
        ],
        rows,
        ("tokens that matched", "accepted tokens per step"),
        "Algorithm 1 with alpha 4, over the steps that had a draft. A match counts as 64 tokens at most.",
    ))
}

fn figure_2b(input: &Input<'_>) -> anyhow::Result<Findings> {
    let growing = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
    let fixed = [1, 2, 4, 8, 16, 32];
    let cases: Vec<Case> = growing
        .map(|alpha| paper(&format!("--alpha {alpha}")))
        .into_iter()
        .chain(fixed.map(|tokens| paper(&format!("--alpha 0 --offset {tokens}"))))
        .collect();
    let calls = |seed| input.after_warm(Kind::Agents, seed);
    let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
    let names = growing
        .map(|alpha| ("grows with the match", format!("alpha {alpha}")))
        .into_iter()
        .chain(fixed.map(|tokens| ("one length", format!("{tokens} tokens"))));
    let rows = names.zip(replays.cases()).map(|((kind, name), outcomes)| {
        let acceptance = outcomes.acceptance().map_or(0.0, |cell| cell.mean);
        Row::new(name, outcomes.cells()).of(kind).at(acceptance)
    });
    Ok(Findings::new(
        "draft",
        &COLUMNS,
        rows,
        ("acceptance", "speed-up"),
        MODELLED,
    ))
}

fn figure_7(input: &Input<'_>) -> anyhow::Result<Findings> {
    let cases = ["request", "global", "request,global"]
        .map(|sources| paper(&format!("--sources {sources}")));
    let mut rows = Vec::new();
    for (number, (workload, _)) in input.by_workload(1).into_iter().enumerate() {
        let calls = |seed| Calls {
            known: Vec::new(),
            replayed: input.of_workload(number, seed),
        };
        let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
        let tokens = replays.cases().map(|outcomes| outcomes.tokens_per_step());
        let speedups = replays.cases().map(|outcomes| outcomes.speedup());
        rows.push(Row::new(workload, tokens.chain(speedups).collect()));
    }
    Ok(Findings::new(
        "workload",
        &[
            Column::measured("tokens: request", 2),
            Column::measured("all outputs", 2),
            Column::measured("both", 2),
            Column::measured("speed-up: request", 2).drawn(),
            Column::measured("speed-up: all outputs", 2).drawn(),
            Column::measured("speed-up: both", 2).drawn(),
        ],
        rows,
        ("", "speed-up"),
        format!(
            "Each workload by itself, from an empty memory that takes in each output. {MODELLED}"
        ),
    ))
}

/// Numbers of known calls, each twice the one before, up to all of them.
fn doubling(all: usize) -> Vec<usize> {
    let first = if all >= 2_048 { 256 } else { (all / 16).max(1) };
    let sizes = std::iter::successors(Some(first), |size| Some(size * 2));
    let mut sizes: Vec<usize> = sizes.take_while(|size| 4 * size < 3 * all).collect();
    sizes.push(all);
    sizes
}

fn figure_8(input: &Input<'_>) -> anyhow::Result<Findings> {
    let calls = |seed| input.last_quarter(Kind::Agents, seed);
    let sizes = doubling(calls(1).known.len());
    let cases: Vec<Case> = sizes
        .iter()
        .map(|size| paper("--frozen").knowing(*size))
        .collect();
    let replays = Replays::run(input, input.seeds(false), calls, &cases)?;
    let rows = sizes
        .iter()
        .zip(replays.cases())
        .map(|(size, outcomes)| Row::new(size.to_string(), outcomes.cells()).at(*size as f64));
    Ok(Findings::new(
        "known outputs",
        &COLUMNS,
        rows,
        ("known outputs", "speed-up"),
        format!(
            "The last quarter of the calls, or all of them after those of --warm. Nothing is added meanwhile. {MODELLED}"
        ),
    ))
}

fn figure_9(input: &Input<'_>) -> anyhow::Result<Findings> {
    let own = |seed| input.quarters(Kind::Agents, seed);
    let shifted = |seed| {
        let mut calls = own(seed);
        let other = input.other(Kind::OpenText, seed);
        calls.known.splice(0..0, other.iter().cloned());
        calls
    };
    let counts: Vec<usize> = (0..=5)
        .map(|hundreds| hundreds * 100)
        .filter(|count| *count <= own(1).known.len())
        .collect();
    let others = input.other(Kind::OpenText, 1).len();
    let knowing = |others: usize| -> Vec<Case> {
        let counts = counts.iter();
        let case = |count: &usize| paper("--frozen").knowing(others + count);
        counts.map(case).collect()
    };
    let after_other = Replays::run(input, input.seeds(false), shifted, &knowing(others))?;
    let alone = Replays::run(input, input.seeds(false), own, &knowing(0))?;
    let both = after_other.cases().zip(alone.cases());
    let rows = counts.iter().zip(both).map(|(count, (after, alone))| {
        let (speedup, acceptance) = match count {
            0 => (Cell::exact(1.5), Cell::exact(0.08)),
            500 => (Cell::exact(2.6), Cell::exact(0.20)),
            _ => (None, None),
        };
        let cells = vec![
            speedup,
            after.speedup(),
            alone.speedup(),
            acceptance,
            after.acceptance(),
        ];
        Row::new(count.to_string(), cells).at(*count as f64)
    });
    Ok(Findings::new(
        "own outputs",
        &[
            Column::published("speed-up", 1).drawn(),
            Column::measured("speed-up", 2).drawn(),
            Column::measured("without the other's", 2).drawn(),
            Column::published("acceptance", 2),
            Column::measured("acceptance", 3),
        ],
        rows,
        ("outputs of the workload itself", "speed-up"),
        format!(
            "The last quarter of the calls, after all of the other workload and the first of its own. The paper has \
             SpiderSQL after WildChat. {MODELLED}"
        ),
    ))
}

fn table_1(input: &Input<'_>) -> anyhow::Result<Findings> {
    let published = ENTROPIES.map(|(name, entropy)| {
        Row::new(format!("paper: {name}"), vec![Cell::exact(entropy), None])
    });
    let workloads = input.by_workload(1).into_iter().enumerate();
    let measured = workloads.map(|(number, (workload, _))| {
        let seeds = input.seeds(false);
        let entropies = seeds.map(|seed| entropy_of_calls(&input.of_workload(number, seed)));
        let entropy = Cell::over(entropies);
        Row::new(workload, vec![None, entropy])
    });
    let mut rows: Vec<Row> = published.into_iter().chain(measured).collect();
    let entropy = |row: &Row| {
        row.cells
            .iter()
            .flatten()
            .next()
            .map_or(0.0, |cell| cell.mean)
    };
    rows.sort_by(|a, b| entropy(a).total_cmp(&entropy(b)));
    Ok(Findings::new(
        "workload",
        &[
            Column::published("entropy", 2).drawn(),
            Column::measured("entropy, bits", 2).drawn(),
        ],
        rows,
        ("", "entropy"),
        format!(
            "{ENTROPY_BANDS} The paper does not name its logarithm, so compare the order rather than the figures."
        ),
    ))
}

fn table_2(input: &Input<'_>) -> anyhow::Result<Findings> {
    let mut rows: Vec<Row> = Vec::new();
    for (entries, tokens_m, megabytes, update_us, lookup_us) in COSTS {
        let cells = vec![
            Cell::exact(tokens_m * 1e6),
            Cell::exact(megabytes / tokens_m),
            None,
            Cell::exact(update_us),
            Cell::exact(lookup_us),
        ];
        rows.push(Row::new(format!("paper: {entries}"), cells));
    }
    let calls = input.last_quarter(Kind::Agents, 1);
    for size in doubling(calls.known.len()) {
        input.line.show(None, format!("{size} known outputs"));
        let replay = |options: &str| {
            let case = paper(&format!("--frozen {options}")).knowing(size);
            replay_case(&case, 1, &calls)
        };
        let (live, sealed) = (replay("")?, replay("--seal-tokens 1")?);
        let tokens = live.costs.warmed.tokens as f64;
        let per_token = |bytes: u64| Cell::exact(bytes as f64 / tokens.max(1.0));
        let total = live.tally.table.total();
        let lookup_us = live
            .tally
            .proposing
            .us()
            .map(|us| us.mean * total.steps as f64);
        let cells = vec![
            Cell::exact(tokens),
            per_token(live.costs.sizes.live_bytes),
            per_token(sealed.costs.sizes.segment_bytes),
            Cell::over([live.costs.warmed.us_per_token()]),
            Cell::over([lookup_us.map(|us| us / total.drafted.max(1) as f64)]),
        ];
        rows.push(Row::new(size.to_string(), cells));
    }
    Ok(Findings::new(
        "known outputs",
        &[
            Column::measured("tokens", 0),
            Column::measured("bytes per token", 1).drawn(),
            Column::measured("sealed", 1).drawn(),
            Column::measured("add, us per token", 2).drawn(),
            Column::measured("look up, us per drafted token", 2).drawn(),
        ],
        rows,
        ("", "bytes, or microseconds"),
        "The times are those of this machine and this build. The paper's outputs repeat their own beginnings, which \
             takes less memory for a token.",
    ))
}

fn by_tau(
    input: &Input<'_>,
    kind: Kind,
    (acceptance, cost): (f64, f64),
    published: &[(f64, f64)],
) -> anyhow::Result<Findings> {
    let head = format!("acc={}cost={cost}", format!("{acceptance},").repeat(8));
    let cases: Vec<Case> = published
        .iter()
        .map(|(tau, _)| {
            let options =
                format!("--preset paper --linear --eagle3 {head} --score-threshold {tau}");
            Case::new(Policy::Paper, options)
        })
        .collect();
    let calls = |seed| input.after_warm(kind, seed);
    let replays = Replays::run(input, input.seeds(true), calls, &cases)?;
    let head_share = |outcomes: &Outcomes<'_>| {
        outcomes.cell(|outcome| {
            let total = outcome.tally.table.total();
            total.per_step(outcome.account.head_steps as f64)
        })
    };
    let rows = published.iter().zip(replays.cases());
    let rows = rows.map(|((tau, speedup), outcomes)| {
        let cells = vec![
            Cell::exact(*speedup),
            outcomes.speedup(),
            outcomes.tokens_per_step(),
            head_share(&outcomes),
        ];
        Row::new(tau.to_string(), cells).at(*tau)
    });
    Ok(Findings::new(
        "tau",
        &[
            Column::published("speed-up", 2).drawn(),
            Column::measured("speed-up", 2).drawn(),
            Column::measured("tokens per step", 2),
            Column::measured("steps of the head", 2),
        ],
        rows,
        ("tau", "speed-up"),
        format!(
            "The head is simulated. It brings the tokens per step and the speed-up that the paper measured with EAGLE-3. \
             {MODELLED}"
        ),
    ))
}
