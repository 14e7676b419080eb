//! The index and the drafts without a mesh: decodes recorded calls one after the other, and drafts each of them from
//! those before it.
//!
//! ```text
//! cargo run --release -p refrain-speculation --example embed_index [-- CALLS.jsonl]
//! ```
//!
//! A line of the file has `prompt_token_ids` and `output_token_ids`; without a file, `examples/calls.jsonl` is read.
//! In your engine, the recorded output is what the model samples: it verifies all draft tokens in one forward pass.

use std::error::Error;
use std::path::Path;

use refrain_speculation::draft::{Lookup, ProposeParams, Scope, Source, propose};
use refrain_speculation::verify::walk;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Token};
use serde::Deserialize;

/// The most draft tokens that one step verifies.
const DRAFT_TOKENS_MAX: usize = 16;

#[derive(Deserialize)]
struct Call {
    prompt_token_ids: Vec<Token>,
    output_token_ids: Vec<Token>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/calls.jsonl");
    let path = std::env::args_os().nth(1).map_or(sample, Into::into);
    let text = std::fs::read_to_string(&path)?;
    let calls = text.lines().map(serde_json::from_str);
    let calls = calls.collect::<Result<Vec<Call>, _>>()?;

    let mut index = Index::new(IndexConfig::default());
    let (mut tokens, mut steps) = (0, 0);
    for (number, call) in calls.iter().enumerate() {
        let key = DocumentKey(number as u128);
        steps += decode(&mut index, key, call)?;
        tokens += call.output_token_ids.len();
        // A finished output moves from the part that grows to a smaller one, with the same answers.
        index.seal(|sealed| sealed == key)?;
    }
    println!(
        "{} calls, {tokens} output tokens in {steps} steps: {:.2} tokens per step instead of 1",
        calls.len(),
        tokens as f64 / steps.max(1) as f64
    );
    Ok(())
}

/// Decodes one call, and returns the number of forward passes.
fn decode(index: &mut Index, key: DocumentKey, call: &Call) -> Result<usize, Box<dyn Error>> {
    let output = &call.output_token_ids;
    let mut context = call.prompt_token_ids.clone();
    // Drafts are found behind the end of a prompt as well, but never contain tokens of it.
    let left_context = &context[context.len().saturating_sub(64)..];
    index.open(key, left_context)?;
    let (mut done, mut steps) = (0, 0);
    while done < output.len() {
        let lookup = Lookup {
            source: Source::Suffix,
            scope: Scope::Tenant,
            index,
            cursor: index.start(&context),
            context: &context,
        };
        let draft = propose(&[lookup], &ProposeParams::default(), DRAFT_TOKENS_MAX);
        // The engine draws its own token behind each token of the draft that it has agreed with.
        let drawn = |path: &[Token]| output.get(done + path.len()).copied();
        let emitted = match draft {
            Some(draft) => walk(&draft.tree, |_, path| drawn(path)).emitted,
            None => Vec::from_iter(drawn(&[])),
        };
        // Other requests can draft from these tokens at once, and so can this one.
        index.append(key, &emitted)?;
        context.extend(&emitted);
        done += emitted.len();
        steps += 1;
    }
    Ok(steps)
}
