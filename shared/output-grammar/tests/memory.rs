//! The estimate of a grammar's memory, compared with what the allocator gave.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use refrain_output_grammar::{GrammarCompiler, GrammarLimits};
use refrain_protocol::engine::{OutputForm, TextForm};
use refrain_tokenization::ModelFiles;
use serde_json::{Map, Value, json};

/// Counts the bytes that all threads have allocated. This file has one test, so nothing else allocates meanwhile.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

static HELD: AtomicIsize = AtomicIsize::new(0);

// SAFETY: all calls are passed on unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(place, layout) }
    }
}

/// Forms from the smallest to the largest.
fn forms() -> Vec<TextForm> {
    let schema = |schema: Value| TextForm::JsonSchema(schema.to_string());
    let object = |count: usize| {
        let kinds = [
            json!({"type": "string", "maxLength": 40}),
            json!({"type": "integer", "minimum": -5, "maximum": 70}),
            json!({"enum": ["red", "green", "blue"]}),
            json!({"type": "array", "items": {"type": "string", "pattern": "^[a-f]{1,3}-[0-9]{2}$"}}),
            json!({"type": "string", "format": "date-time"}),
        ];
        let properties: Map<String, Value> = (0..count)
            .map(|number| {
                (
                    format!("property_{number}"),
                    kinds[number % kinds.len()].clone(),
                )
            })
            .collect();
        json!({"type": "object", "properties": properties, "additionalProperties": false})
    };
    let words = (0..1_000).map(|number| format!("word number {number}"));
    let mut ebnf = "root ::= rule_0\n".to_owned();
    for number in 0..300 {
        let _ = writeln!(
            ebnf,
            "rule_{number} ::= \"text {number}\" | rule_{} \"x\"",
            number + 1
        );
    }
    ebnf.push_str("rule_300 ::= [a-z]+\n");
    vec![
        TextForm::Choice(vec!["yes".into(), "no".into()]),
        TextForm::JsonObject,
        TextForm::Regex("[a-z]{3,9}@[a-z]+\\.com".into()),
        schema(object(3)),
        schema(object(24)),
        schema(object(200)),
        schema(json!({"type": "string", "maxLength": 2_000})),
        schema(json!({"type": "array", "items": object(12), "minItems": 1, "maxItems": 30})),
        TextForm::Choice(words.collect()),
        TextForm::Ebnf(ebnf),
    ]
}

#[test]
fn the_estimate_is_near_what_is_allocated() {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../services/reference-engine/model");
    let tokenizer = Arc::new(ModelFiles::from_dir(folder).unwrap().tokenizer().unwrap());
    let eos = tokenizer.token_id("<|im_end|>").unwrap();
    let size = tokenizer.vocab_size();
    // Nothing is kept, so that the grammar is freed with its last holder.
    let limits = GrammarLimits {
        cached_bytes_max: 0,
        ..GrammarLimits::default()
    };
    let compiler = GrammarCompiler::new(tokenizer, size, &[eos], limits).unwrap();
    // The first one starts the thread, which stays for a while.
    compiler
        .compile(&OutputForm::new(TextForm::Choice(vec!["a".into()])))
        .unwrap();
    let mut report = String::new();
    let mut is_near = true;
    for text in forms() {
        let form = OutputForm::new(text);
        let grammar = compiler.compile(&form).unwrap();
        // The thread that compiled it lets go of it a little later.
        while Arc::strong_count(&grammar) > 1 {
            std::thread::yield_now();
        }
        let estimate = grammar.bytes() as f64;
        let with = HELD.load(Ordering::Relaxed);
        drop(grammar);
        let measured = (with - HELD.load(Ordering::Relaxed)) as f64;
        is_near &= (0.5..2.0).contains(&(estimate / measured));
        let text_bytes = form.text.text_bytes();
        let _ = writeln!(
            report,
            "{text_bytes} bytes of form: {estimate} for {measured}"
        );
    }
    assert!(is_near, "{report}");
}
