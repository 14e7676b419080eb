//! Random walks through the masks: what they write has the form.

use proptest::prelude::*;
use refrain_protocol::engine::TextForm;
use serde_json::Value;

use super::{MODEL, allows, encode, form, matcher, schema};
use crate::{GrammarCompiler, GrammarLimits, Matcher, TokenId};

/// A stream of numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound.max(1)
    }
}

/// Writes an output of tokens that the masks allow. `None` if it did not end within `tokens_max`.
fn walk(matcher: &mut Matcher, dice: &mut Dice, tokens_max: usize) -> Option<Vec<TokenId>> {
    let mut output = Vec::new();
    while output.len() < tokens_max {
        let allowed: Vec<TokenId> = matcher.allowed().unwrap().expect("bound").iter().collect();
        assert!(!allowed.is_empty());
        let token = match allowed.contains(&MODEL.eos) {
            true if dice.below(3) > 0 => MODEL.eos,
            _ => allowed[dice.below(allowed.len())],
        };
        matcher.advance(&[token]).unwrap();
        if token == MODEL.eos {
            return Some(output);
        }
        output.push(token);
    }
    None
}

const SCHEMAS: [&str; 8] = [
    r#"{"type":"object","properties":{"name":{"type":"string","maxLength":8},"age":{"type":"integer","minimum":0,"maximum":130}},"required":["name","age"],"additionalProperties":false}"#,
    r#"{"enum":["red","green",3,null,true,[1],{"a":1}]}"#,
    r#"{"type":"array","items":{"enum":["x","yy"]},"minItems":1,"maxItems":3}"#,
    r#"{"type":"object","properties":{"a":{"type":"boolean"},"b":{"type":"string","pattern":"^[a-c]{2,4}$"},"c":{"type":"null"}},"additionalProperties":false}"#,
    r#"{"type":"number","minimum":-1.5,"maximum":12.25}"#,
    r##"{"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"v":{"enum":[1,2]},"next":{"anyOf":[{"type":"null"},{"$ref":"#/$defs/node"}]}},"required":["v","next"],"additionalProperties":false}}}"##,
    r#"{"anyOf":[{"type":"string","format":"date"},{"const":"never"}]}"#,
    r#"{"allOf":[{"type":"object","properties":{"p":{"type":"integer","multipleOf":5,"minimum":0,"maximum":20}},"required":["p"]},{"maxProperties":1}]}"#,
];

#[test]
fn what_masks_allow_is_valid() {
    let mut ended = 0;
    for text in SCHEMAS {
        let judge = jsonschema::validator_for(&serde_json::from_str(text).unwrap()).unwrap();
        for seed in 0..20 {
            let Some(output) = walk(&mut matcher(schema(text)), &mut Dice(seed), 300) else {
                continue;
            };
            ended += 1;
            let json = MODEL.tokenizer.decode(&output);
            let value: Value = serde_json::from_str(&json)
                .unwrap_or_else(|error| panic!("{error}: {json} by {text}"));
            assert!(judge.is_valid(&value), "{json} by {text}");
        }
    }
    assert!(ended > 120, "only {ended} outputs ended");
}

#[test]
fn masks_depend_on_the_output_alone() {
    let cases = (ProptestConfig::default().cases / 10).max(1);
    proptest!(ProptestConfig::with_cases(cases), |(index in 0..SCHEMAS.len(), seed: u64)| {
        let text = SCHEMAS[index];
        let mut dice = Dice(seed);
        let Some(output) = walk(&mut matcher(schema(text)), &mut dice, 60) else {
            return Ok(());
        };
        // One matcher that asks everywhere, tries siblings, and goes back by random steps.
        let mut wanderer = matcher(schema(text));
        let mut at = 0;
        let mut masks = vec![None; output.len() + 1];
        while at < output.len() {
            let mask = wanderer.allowed().unwrap().cloned();
            if let Some(known) = masks[at].replace(mask.clone()) {
                prop_assert_eq!(&known, &mask);
            }
            let siblings: Vec<TokenId> = mask.unwrap().iter().collect();
            let sibling = siblings[dice.below(siblings.len())];
            if wanderer.advance_while_allowed(&[sibling]).unwrap() == 1 {
                let mut further = 1;
                if dice.below(2) == 0 {
                    let forced = wanderer.forced(5).unwrap();
                    for token in &forced {
                        let mask = wanderer.allowed().unwrap().unwrap();
                        prop_assert_eq!(mask.only(), Some(*token));
                        wanderer.advance(&[*token]).unwrap();
                    }
                    further += forced.len();
                }
                wanderer.rollback(further).unwrap();
            }
            if dice.below(4) == 0 {
                let back = dice.below(at + 1);
                wanderer.rollback(back).unwrap();
                at -= back;
            }
            let ahead = 1 + dice.below(output.len() - at);
            wanderer.advance(&output[at..at + ahead]).unwrap();
            at += ahead;
        }
        // Fresh ones that ask nothing on the way.
        for (at, mask) in masks.iter().enumerate() {
            if let Some(mask) = mask {
                let mut fresh = matcher(schema(text));
                fresh.advance(&output[..at]).unwrap();
                prop_assert_eq!(fresh.allowed().unwrap().cloned(), mask.clone(), "at {} of {:?}", at, MODEL.tokenizer.decode(&output));
            }
        }
    });
}

#[test]
fn forced_tokens_are_those_of_the_tokenizer() {
    let text = r#"{"type":"object","properties":{"customer_name":{"enum":["Bob"]},"customer_age":{"const":7}},"required":["customer_name","customer_age"],"additionalProperties":false}"#;
    let mut matcher = matcher(schema(text));
    let forced = matcher.forced(100).unwrap();
    let json = r#"{"customer_name": "Bob", "customer_age": 7}"#;
    let mut expected = encode(json);
    expected.push(MODEL.eos);
    assert_eq!(MODEL.tokenizer.decode(&forced), json);
    assert_eq!(forced, expected);
    assert_eq!(matcher.forced(3).unwrap(), expected[..3]);
    assert!(matcher.is_empty());
    matcher.advance(&expected).unwrap();
    assert!(matcher.must_end() && matcher.may_end().unwrap());
    matcher.rollback(2).unwrap();
    assert!(!matcher.must_end() && !matcher.may_end().unwrap());
    assert_eq!(matcher.forced(9).unwrap(), expected[expected.len() - 2..]);
}

#[test]
fn texts_of_other_forms() {
    let choice = || TextForm::Choice(vec!["yes".into(), "no way".into(), "no".into()]);
    for text in ["yes", "no", "no way"] {
        assert!(allows(choice(), text));
    }
    assert!(!allows(choice(), "no w") && !allows(choice(), "maybe"));
    let regex = |pattern: &str| TextForm::Regex(pattern.to_owned());
    assert!(allows(regex("[a-z]+@[a-z]+\\.com"), "ab@cd.com"));
    assert!(allows(regex("^[0-9]{3}$"), "123") && !allows(regex("^[0-9]{3}$"), "12"));
    assert!(allows(regex("a/b\\$"), "a/b$"));
    let lark = TextForm::Lark("start: \"a\" inner* \"b\"\ninner: \"[\" inner* \"]\"\n".into());
    assert!(allows(lark.clone(), "a[[]][]b") && !allows(lark, "a[[]b"));
    assert!(allows(
        TextForm::JsonObject,
        r#"{"a": [1, {"b": "\n"}], "c": null}"#
    ));
    assert!(!allows(TextForm::JsonObject, "[1]"));
}

#[test]
fn an_output_ends_with_its_own_stop_tokens() {
    let stop = MODEL.tokenizer.token_id("<|im_start|>").unwrap();
    let regex = || matcher(TextForm::Regex("[a-z ]+".into()));
    assert!(!regex().with_stops(&[stop]).accepts(stop).unwrap());
    let mut open = regex().with_stops(&[stop]);
    open.advance(&encode("some words")).unwrap();
    assert!(open.accepts(stop).unwrap() && open.accepts(MODEL.eos).unwrap());
    open.advance(&[stop]).unwrap();
    assert_eq!(open.allowed().unwrap().unwrap().only(), Some(stop));
    open.rollback(1).unwrap();
    assert!(open.accepts(encode(" x")[0]).unwrap());
    // A request whose stop tokens lack that of the model ends a token later, not at its limit.
    open.advance(&[MODEL.eos]).unwrap();
    assert_eq!(open.allowed().unwrap().unwrap().only(), Some(stop));
    let mut unknown = regex().with_stops(&[u32::MAX]);
    unknown.advance(&encode("some words")).unwrap();
    assert_eq!(unknown.advance_while_allowed(&[u32::MAX]).unwrap_or(0), 0);
    let mut without = regex();
    without.advance(&encode("some words")).unwrap();
    assert!(!without.accepts(stop).unwrap());
}

#[test]
fn a_long_output_is_taken_up_again() {
    let text = TextForm::Regex("([a-z]{2,7}[0-9 ]){600,3000}".into());
    // Without masks on the way, the output takes more work than these limits leave.
    let limits = GrammarLimits {
        compile_fuel: 20_000,
        mask_fuel: 20_000,
        ..GrammarLimits::default()
    };
    let size = MODEL.tokenizer.vocab_size();
    let compiler = GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits);
    let grammar = compiler.unwrap().compile(&form(text)).unwrap();
    let mut dice = Dice(7);
    let mut first = grammar.matcher();
    let mut output = Vec::new();
    while output.len() < 2_000 {
        let allowed: Vec<TokenId> = first.allowed().unwrap().unwrap().iter().collect();
        let token = allowed[dice.below(allowed.len())];
        first.advance(&[token]).unwrap();
        output.push(token);
    }
    let mask = first.allowed().unwrap().cloned();
    let mut again = grammar.matcher();
    again.advance(&output).unwrap();
    assert_eq!(again.allowed().unwrap().cloned(), mask);
    first.restart(&output).unwrap();
    assert_eq!(first.allowed().unwrap().cloned(), mask);
}

#[test]
fn only_the_tokens_of_masks_are_entered() {
    let text = r#"{"type":"object","properties":{"customer_name":{"const":"Bob"}},"required":["customer_name"],"additionalProperties":false}"#;
    let mut at = matcher(schema(text));
    for expected in at.forced(50).unwrap() {
        for other in 0..MODEL.tokenizer.vocab_size() {
            if other != expected {
                assert_eq!(at.advance_while_allowed(&[other]).unwrap(), 0);
            }
        }
        assert_eq!(at.advance_while_allowed(&[expected]).unwrap(), 1);
    }
}

/// A limit may end the matching, but never gives another mask: drafts are visited up to a limit as well.
#[test]
fn near_a_limit_a_mask_is_right_or_an_error() {
    let forced = schema(
        r#"{"type":"object","properties":{"address":{"const":"of the sender"},"is active":{"enum":["red","reddish"]}},
            "required":["address","is active"],"additionalProperties":false}"#,
    );
    let text = encode(r#"{"address": "of the sender", "is active": "reddish"}"#);
    let masks = |states_max| -> Vec<Option<crate::TokenMask>> {
        let limits = GrammarLimits {
            states_max,
            ..GrammarLimits::default()
        };
        let size = MODEL.tokenizer.vocab_size();
        let compiler =
            GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits).unwrap();
        let Ok(grammar) = compiler.compile(&form(forced.clone())) else {
            return Vec::new();
        };
        let mut matcher = grammar.matcher();
        let mut masks = Vec::new();
        for token in &text {
            let Ok(mask) = matcher.allowed() else {
                break;
            };
            masks.push(mask.cloned());
            if matcher.advance(&[*token]).is_err() {
                break;
            }
        }
        masks
    };
    let truth = masks(GrammarLimits::default().states_max);
    assert_eq!(truth.len(), text.len());
    let mut cut = 0;
    for states_max in 1..150 {
        let masks = masks(states_max);
        assert_eq!(masks[..], truth[..masks.len()], "{states_max} states");
        cut += usize::from((1..truth.len()).contains(&masks.len()));
    }
    assert!(cut > 10, "{cut}");
}

#[test]
fn a_restart_repeats_how_an_output_came_and_keeps_it_where_it_fails() {
    let ambiguous = TextForm::Lark("start: s\ns: s s | \"a\"".into());
    let limits = GrammarLimits {
        output_work_max: 200_000,
        ..GrammarLimits::default()
    };
    let size = MODEL.tokenizer.vocab_size();
    let compiler = GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits);
    let grammar = compiler.unwrap().compile(&form(ambiguous)).unwrap();
    let letter = encode("a")[0];
    // Its masks would take more work than it may take.
    let output = vec![letter; 63];
    let mut together = grammar.matcher();
    together.advance(&output).unwrap();
    let mut stepwise = grammar.matcher();
    assert!(stepwise.restart_with_masks(&output).is_err());
    assert_eq!(stepwise.output(), output);
    together.restart(&output).unwrap();
    // A draft that is refused finds the limit, and takes nothing of the output away.
    let mask = together.allowed().is_ok();
    assert_eq!(together.advance_while_allowed(&[letter]).is_ok(), mask);
    assert_eq!(together.output()[..63], output);
}
