//! The budgets of forms that are built to cost much.

use refrain_protocol::engine::TextForm;

use super::{MODEL, encode, form, refusal, schema};
use crate::testing::hostile_forms;
use crate::{GrammarCompiler, GrammarError, GrammarLimits, Matcher, TokenId};

/// A rule of two of itself: the rows of its parser grow with each letter.
const AMBIGUOUS: &str = "start: s\ns: s s | \"a\" | \"b\"";

fn ambiguous(limits: GrammarLimits) -> Matcher {
    let size = MODEL.tokenizer.vocab_size();
    let compiler = GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits);
    let text = TextForm::Lark(AMBIGUOUS.into());
    compiler.unwrap().compile(&form(text)).unwrap().matcher()
}

/// Appends letters with a mask before each, and returns their number when a limit is met.
fn letters_until_a_limit(matcher: &mut Matcher) -> (usize, GrammarError) {
    let letter = encode("a")[0];
    for count in 0..10_000 {
        let taken = matcher.allowed().map(|_| ());
        if let Err(error) = taken.and_then(|()| matcher.advance(&[letter])) {
            return (count, error);
        }
    }
    panic!("no limit was met");
}

#[test]
fn an_ambiguous_output_ends_by_its_work_and_always_at_the_same_token() {
    let limits = GrammarLimits {
        output_work_max: 20_000_000,
        ..GrammarLimits::default()
    };
    let mut matcher = ambiguous(limits.clone());
    let (count, error) = letters_until_a_limit(&mut matcher);
    let GrammarError::Matching(reason) = error else {
        panic!("{error:?}");
    };
    assert!(reason.contains("ambiguous"), "{reason}");
    assert!((10..200).contains(&count), "{count}");
    assert_eq!(
        letters_until_a_limit(&mut ambiguous(limits.clone())).0,
        count
    );
    // Tokens that are taken back count, until the matcher begins anew.
    let mut matcher = ambiguous(limits);
    let letter = encode("a")[0];
    let output = vec![letter; count - 1];
    let mut is_met = false;
    for token in &output {
        is_met |= matcher.allowed().is_err();
        is_met |= matcher
            .advance(&[*token])
            .and_then(|()| matcher.rollback(1))
            .is_err();
        is_met |= matcher.advance(&[*token]).is_err();
        is_met |= matcher.allowed().is_err();
    }
    assert!(is_met || matcher.work() > 10_000_000);
    matcher.restart(&output).unwrap();
    let (more, _) = letters_until_a_limit(&mut matcher);
    assert_eq!(output.len() + more, count);
}

#[test]
fn a_row_has_few_items() {
    let limits = GrammarLimits {
        row_items_max: 100,
        ..GrammarLimits::default()
    };
    let (count, _) = letters_until_a_limit(&mut ambiguous(limits));
    assert!(count < 100, "{count}");
}

#[test]
fn a_matcher_that_is_stopped_does_no_work_any_longer() {
    let mut matcher = ambiguous(GrammarLimits::default());
    let letter = encode("a")[0];
    matcher.advance(&[letter]).unwrap();
    matcher.allowed().unwrap();
    let work = matcher.work();
    matcher.stop_signal().set();
    assert!(matcher.advance(&[letter]).is_err());
    // It does not come back by a new beginning either.
    assert!(matcher.restart(&[letter; 100]).is_err());
    assert!(matcher.work() <= work);
}

#[test]
fn a_multiple_of_a_large_number_is_refused() {
    for text in [
        r#"{"type":"integer","multipleOf":1000003}"#,
        r#"{"type":"number","multipleOf":1000.03}"#,
        r#"{"type":"number","multipleOf":1e-9}"#,
        r#"{"allOf":[{"type":"integer","multipleOf":101},{"multipleOf":103}]}"#,
        r#"{"allOf":[{"type":"number","multipleOf":0.5},{"multipleOf":3}]}"#,
    ] {
        let message = refusal(schema(text)).to_string();
        assert!(message.contains("multipleOf"), "{message}");
    }
    for text in [
        r#"{"type":"integer","multipleOf":9973}"#,
        r#"{"type":"number","multipleOf":0.01}"#,
        r#"{"allOf":[{"type":"integer","multipleOf":97},{"multipleOf":101}]}"#,
    ] {
        let outcome = MODEL.compiler.compile(&form(schema(text)));
        assert!(outcome.is_ok(), "{:?} for {text}", outcome.err());
    }
}

/// After the letter `d`, three terminals must hold, whose shortest common text has as many letters as the product of
/// their periods. To find that out takes a state for each letter.
#[test]
fn first_bytes_are_looked_at_within_the_fuel() {
    let lark = |periods: [u32; 3]| {
        let terminals = periods
            .map(|period| format!("/(a{{{period}}})+/"))
            .join(" & ");
        TextForm::Lark(format!("start: T\nT: \"c\" | \"d\" ({terminals})"))
    };
    let message = refusal(lark([197, 199, 211])).to_string();
    assert!(message.contains("too complex"), "{message}");
    MODEL.compiler.compile(&form(lark([2, 3, 5]))).unwrap();
}

/// The fate of a form: the bytes of its grammar and the length and work of an output, or why there is none.
fn fate(text: &TextForm, seed: usize) -> String {
    let size = MODEL.tokenizer.vocab_size();
    let limits = GrammarLimits::default();
    let compiler =
        GrammarCompiler::new(MODEL.tokenizer.clone(), size, &[MODEL.eos], limits.clone());
    let grammar = match compiler.unwrap().compile(&form(text.clone())) {
        Ok(grammar) => grammar,
        Err(error) => return error.to_string(),
    };
    assert!(
        grammar.bytes() < limits.cached_bytes_max,
        "{}",
        grammar.bytes()
    );
    let mut matcher = grammar.matcher();
    let mut end = String::new();
    for number in 0..48 {
        let allowed = match matcher.allowed() {
            Ok(allowed) => allowed.unwrap(),
            Err(error) => {
                end = error.to_string();
                break;
            }
        };
        let tokens: Vec<TokenId> = allowed.iter().collect();
        let token = tokens[(seed + number * 7_919) % tokens.len()];
        if let Err(error) = matcher.advance(&[token]) {
            end = error.to_string();
            break;
        }
        if matcher.is_over() {
            break;
        }
    }
    // One mask can go beyond the budget, by what the limits of a mask and of a row leave to it.
    let most = limits.mask_items_max + limits.row_items_max;
    assert!(matcher.work() <= limits.output_work_max + (most as u64).pow(2));
    format!("{} tokens, work {}: {end}", matcher.len(), matcher.work())
}

#[test]
fn hostile_forms_stay_in_their_budgets_and_meet_the_same_fate_again() {
    let forms = hostile_forms(7, 36);
    let mut refused = 0;
    for (seed, hostile) in forms.iter().enumerate() {
        let fates = [fate(&hostile.text, seed), fate(&hostile.text, seed)];
        assert_eq!(fates[0], fates[1], "{}", hostile.kind);
        refused += usize::from(!fates[0].contains(" tokens, work "));
    }
    // Some are refused and some are not, so both ways are tried.
    assert!((5..31).contains(&refused), "{refused}");
}

/// Steps leave the masks of a form to other threads from the first one on where this time says so.
#[test]
fn the_time_of_tokens_tells_costly_forms_from_others() {
    let compile = |text: &TextForm| MODEL.compiler.compile(&form(text.clone())).ok();
    let time = |text: &TextForm| compile(text).map(|grammar| grammar.token_time());
    let small = time(&schema(
        r#"{"type":"object","properties":{"name":{"type":"string"}}}"#,
    ));
    for kind in ["nullable_grammar", "long_rules", "excluding_terminals"] {
        let forms = hostile_forms(1, 90).into_iter();
        let costly = forms.filter(|hostile| hostile.kind == kind);
        let most = costly.filter_map(|hostile| time(&hostile.text)).max();
        assert!(
            most > small.map(|time| time * 10),
            "{kind}: {most:?}, {small:?}"
        );
    }
}

/// Prints how long each of many forms takes. `REFRAIN_HOSTILE_FORMS` has their number.
#[test]
fn costs_of_hostile_forms_are_printed() {
    let count = std::env::var("REFRAIN_HOSTILE_FORMS");
    let Ok(count) = count.unwrap_or_default().parse() else {
        return;
    };
    for (seed, hostile) in hostile_forms(1, count).iter().enumerate() {
        let text: String = format!("{:?}", hostile.text).chars().take(100).collect();
        eprintln!("{seed} {text}");
        let started = std::time::Instant::now();
        let fate = fate(&hostile.text, seed);
        println!("{:>9.1?} {seed} {} {fate}", started.elapsed(), hostile.kind);
    }
}
