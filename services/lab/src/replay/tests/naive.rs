//! A replay that keeps nothing between steps: before each proposal, every index is rebuilt from the texts that it
//! should hold. The draft from an index is left to `propose`, whose tests have a model of their own.

use clap::Parser;
use refrain_speculation::draft::{Lookup, Scope, Source, propose};
use refrain_suffix_index::{DocumentKey, Index};
use serde_json::{Value, json};

use super::super::{ReplayOptions, ReplaySource, Setup};
use super::Cli;

#[derive(Clone, Debug)]
struct Document {
    tenant: Value,
    session: Value,
    group: Value,
    prompt: Vec<u32>,
    output: Vec<u32>,
    /// Tokens of the output so far.
    emitted: usize,
}

/// Calls of two tenants, in sessions and groups, made of a few phrases of a small vocabulary.
pub(super) fn calls(seed: u64) -> Vec<Value> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) % below
    };
    let phrases: Vec<Vec<u64>> = (0..6)
        .map(|_| (0..4 + random(8)).map(|_| random(12)).collect())
        .collect();
    let mut text = |len: u64| -> Vec<u64> {
        let mut tokens = Vec::new();
        while (tokens.len() as u64) < len {
            match random(4) {
                0 => tokens.push(random(12)),
                _ => tokens.extend(&phrases[random(6) as usize]),
            }
        }
        tokens
    };
    let texts: Vec<[Vec<u64>; 2]> = (0..24)
        .map(|call| [text(call % 5 * 6), text(call % 7 * 5)])
        .collect();
    let mut name = |names: [Option<&'static str>; 3]| names[random(3) as usize];
    texts
        .into_iter()
        .map(|[prompt, output]| {
            json!({
                "tenant": name([None, None, Some("t")]),
                "session": name([None, Some("s1"), Some("s2")]),
                "group": name([None, Some("g1"), Some("g2")]),
                "prompt_token_ids": prompt,
                "output_token_ids": output,
            })
        })
        .collect()
}

/// Steps, drafted, accepted and emitted tokens of request, group, global and no source.
pub(super) fn replay(calls: &[Value], args: &str) -> [[u64; 4]; 4] {
    let args = super::of_the_paper(args);
    let arguments = ["replay", "unused"]
        .into_iter()
        .chain(args.split_whitespace());
    let options = Cli::try_parse_from(arguments)
        .expect("good arguments")
        .options;
    let tokens = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).expect("tokens");
    let all: Vec<Document> = calls
        .iter()
        .map(|call| Document {
            tenant: call["tenant"].clone(),
            session: call["session"].clone(),
            group: call["group"].clone(),
            prompt: tokens(&call["prompt_token_ids"]),
            output: tokens(&call["output_token_ids"]),
            emitted: 0,
        })
        .collect();
    let mut known: Vec<Document> = Vec::new();
    if !options.warm.is_empty() {
        known = all.clone();
        known
            .iter_mut()
            .for_each(|document| document.emitted = document.output.len());
    }
    let setup = options.setup().expect("settings of a replay");
    let mut counts = [[0; 4]; 4];
    let mut pending = all;
    let mut running: Vec<Document> = Vec::new();
    loop {
        while running.len() < options.concurrency[0] {
            let is_free = |call: &Document| {
                call.session.is_null()
                    || running.iter().all(|other| {
                        (&other.tenant, &other.session) != (&call.tenant, &call.session)
                    })
            };
            let Some(next) = pending.iter().position(is_free) else {
                break;
            };
            running.push(pending.remove(next));
        }
        if running.is_empty() {
            return counts;
        }
        let moves: Vec<_> = (0..running.len())
            .map(|at| step(&options, &setup, &known, &running, at))
            .collect();
        for (document, (source, [drafted, accepted, emitted])) in running.iter_mut().zip(moves) {
            document.emitted += emitted as usize;
            if emitted > 0 {
                for (sum, add) in counts[source]
                    .iter_mut()
                    .zip([1, drafted, accepted, emitted])
                {
                    *sum += add;
                }
            }
        }
        let (ended, going): (Vec<_>, Vec<_>) = running
            .into_iter()
            .partition(|document| document.emitted == document.output.len());
        running = going;
        if !options.frozen {
            known.extend(ended);
        }
    }
}

/// One step of a running call: its source, and the drafted, accepted and emitted tokens.
fn step(
    options: &ReplayOptions,
    setup: &Setup,
    known: &[Document],
    running: &[Document],
    at: usize,
) -> (usize, [u64; 3]) {
    let this = &running[at];
    let left = &this.output[this.emitted..];
    let context = [&this.prompt, &this.output[..this.emitted]].concat();
    let visible: Vec<&Document> = match options.frozen {
        true => known.iter().collect(),
        false => known.iter().chain(running).collect(),
    };
    let index = |is_in: &dyn Fn(&Document) -> bool| {
        let mut index = Index::new(setup.indexes.index.clone());
        for (key, document) in visible
            .iter()
            .enumerate()
            .filter(|(_, document)| is_in(document))
        {
            let key = DocumentKey(key as u128);
            let left = &document.prompt[document.prompt.len().saturating_sub(16)..];
            index.open(key, left).expect("room");
            index
                .append(key, &document.output[..document.emitted])
                .expect("room");
        }
        index
    };
    let global = index(&|document| document.tenant == this.tenant);
    let group = index(&|document| {
        (&document.tenant, &document.group) == (&this.tenant, &this.group) && !this.group.is_null()
    });
    let mut own = Index::new(setup.indexes.index.clone());
    own.open(DocumentKey(0), &[]).expect("room");
    own.append(DocumentKey(0), &context).expect("room");
    let key = DocumentKey((known.len() + at) as u128);
    let places = [
        (
            ReplaySource::Request,
            Scope::Request,
            &own,
            own.tip(DocumentKey(0)),
        ),
        (ReplaySource::Group, Scope::Group, &group, group.tip(key)),
        (
            ReplaySource::Global,
            Scope::Tenant,
            &global,
            global.tip(key),
        ),
    ];
    let lookups: Vec<Lookup<'_>> = places
        .into_iter()
        .filter(|(source, ..)| options.has(*source))
        .map(|(_, scope, index, tip)| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor: tip.unwrap_or_else(|| index.start(&context)),
            context: &context,
        })
        .collect();
    let params = &setup.serving.rules.whole(1, None);
    let Some(draft) = propose(&lookups, params, params.max_spec_tokens) else {
        return (3, [0, 0, left.len().min(1) as u64]);
    };
    let mut node = None;
    let mut accepted = 0;
    while let Some(child) = left
        .get(accepted)
        .and_then(|&token| draft.tree.child(node, token))
    {
        node = Some(child);
        accepted += 1;
    }
    let emitted = left.len().min(accepted + 1);
    let counts = [draft.tree.len(), accepted, emitted].map(|count| count as u64);
    let source = match draft.scope {
        Scope::Request => 0,
        Scope::Group => 1,
        Scope::Tenant => 2,
    };
    (source, counts)
}
