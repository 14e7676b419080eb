//! The trends that papers report of their workloads, on generated calls: which policy wins, and what grows with what.

use serde_json::{Value, json};

use super::super::{Policy, ReplayReport, Window};
use super::{replay, replay_after};

/// EAGLE-3 by SuffixDecoding's tables of agents' SQL (arXiv 2411.04975, appendix A): 3.16 tokens per step over eight
/// passes. The passes are so expensive that it is only 1.62 times as fast as plain decoding.
const HEAD: &str = "--eagle3 acc=0.695,0.695,0.695,0.695,0.695,0.695,0.695,0.695,cost=0.12";

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// A random token of the `words` tokens from `first` on.
    fn text(&mut self, first: u64, words: u64, len: u64) -> Vec<u64> {
        (0..len).map(|_| first + self.below(words)).collect()
    }
}

/// Answers of an agent: six of its forty texts, each followed by a value. Agents with other numbers have other texts,
/// of other tokens.
fn agent(number: u64, calls: usize) -> Vec<Value> {
    let (mut random, first) = (Random(number), number * 1000);
    let texts: Vec<Vec<u64>> = (0..40)
        .map(|_| {
            let len = 4 + random.below(16);
            random.text(first, 900, len)
        })
        .collect();
    let mut answer = || -> Vec<u64> {
        let parts = (0..6).flat_map(|_| {
            let mut part = texts[random.below(40) as usize].clone();
            part.extend(random.text(first + 900, 100, 1));
            part
        });
        parts.collect()
    };
    let answers = (0..calls).map(|_| json!({"output_token_ids": answer()}));
    answers.collect()
}

/// Prose: sixty tokens may follow every token, some of them more often.
fn prose(calls: usize) -> Vec<Value> {
    let mut random = Random(1);
    let mut text = || -> Vec<u64> {
        let mut last = 0;
        let next = |_| {
            let rank = random.below(60).min(random.below(60));
            last = Random(last * 61 + rank).below(3000);
            last
        };
        (0..120).map(next).collect()
    };
    let texts = (0..calls).map(|_| json!({"output_token_ids": text()}));
    texts.collect()
}

/// Sixteen samples of each of twelve prompts. At twenty positions a sample continues in one of its prompt's three
/// ways, of which one is likelier. Sometimes it repeats its own text.
fn samples() -> Vec<Value> {
    let mut random = Random(5);
    let mut calls = Vec::new();
    for group in 0..12 {
        let ways: Vec<[Vec<u64>; 3]> = (0..20)
            .map(|_| {
                std::array::from_fn(|_| {
                    let len = 3 + random.below(7);
                    random.text(0, 5000, len)
                })
            })
            .collect();
        for _ in 0..16 {
            let mut said: Vec<&[u64]> = Vec::new();
            for ways in &ways {
                let way = [0, 0, 0, 0, 0, 0, 1, 1, 1, 2][random.below(10) as usize];
                let again = !said.is_empty() && random.below(7) == 0;
                let at = random.below(said.len().max(1) as u64) as usize;
                let part = if again { said[at] } else { &ways[way] };
                said.push(part);
            }
            calls.push(json!({"group": group.to_string(), "output_token_ids": said.concat()}));
        }
    }
    calls
}

fn speedup(report: &ReplayReport, policy: Policy) -> f64 {
    let mut rows = report.policies.iter();
    let row = rows.find(|row| row.policy == policy);
    row.and_then(|row| row.speedup).expect("compared")
}

/// SuffixDecoding, Figures 3 and 5: suffix drafts win alone on agents, and with EAGLE-3 behind them on open text.
#[test]
fn suffix_drafts_alone_win_where_text_repeats_and_the_hybrid_where_it_is_open() -> anyhow::Result<()>
{
    let compare = |calls: &[Value]| {
        let report = replay(calls, &format!("--policies eagle3,suffix,score {HEAD}"))?;
        let of = |policy| speedup(&report, policy);
        anyhow::Ok((of(Policy::Suffix), of(Policy::Score), of(Policy::Eagle3)))
    };
    let (suffix, hybrid, head) = compare(&agent(1, 200))?;
    assert!(
        suffix > 1.05 * hybrid && hybrid > 1.2 * head,
        "agent: {suffix} {hybrid} {head}"
    );
    let (suffix, hybrid, head) = compare(&prose(60))?;
    assert!(
        hybrid > 1.2 * suffix && hybrid > 0.97 * head,
        "prose: {suffix} {hybrid} {head}"
    );
    Ok(())
}

/// Seer, Table 2: the samples of a prompt more than double the accepted tokens of its own text, and several paths
/// bring more.
#[test]
fn samples_of_a_prompt_double_what_is_accepted_and_paths_add_to_it() -> anyhow::Result<()> {
    let accepted = |args: &str| {
        let args = format!("--max-spec-tokens 64 --min-token-prob 0.1 {args}");
        let report = replay(&samples(), &args)?;
        anyhow::Ok(report.tokens_per_step.expect("steps") - 1.0)
    };
    let own = accepted("--sources request --linear")?;
    let group = accepted("--sources request,group --linear")?;
    let two = accepted("--sources request,group --paths 2")?;
    let four = accepted("--sources request,group --paths 4")?;
    assert!(own > 0.0 && group > 2.0 * own, "{own} {group}");
    assert!(two > 1.01 * group && four > two, "{group} {two} {four}");
    Ok(())
}

/// SuffixDecoding, section 5.4: a memory that was warmed with other calls drafts badly at first. Within five hundred
/// calls it drafts as well as one that was warmed with these.
#[test]
fn a_memory_gets_used_to_other_calls_within_five_hundred() -> anyhow::Result<()> {
    let mut calls = agent(2, 1000);
    let served = calls.split_off(500);
    let serve_after = |known: &[Value]| replay_after(known, &served, "--window 100");
    let per_step = |window: &Window| window.tokens_per_step.expect("steps");
    let (own, other) = (
        serve_after(&calls)?.windows,
        serve_after(&agent(3, 500))?.windows,
    );
    assert_eq!((own.len(), other.len()), (5, 5));
    let share = |at: usize| per_step(&other[at]) / per_step(&own[at]);
    assert!(share(0) < 0.9, "{}", share(0));
    assert!(share(4) > 0.93, "{}", share(4));
    Ok(())
}
