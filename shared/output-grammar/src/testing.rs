//! Forms that are built to cost much, for tests and for trials of a mesh.
//!
//! They come from a seed, so that a trial can be repeated: nested repetitions, large bounds, long enumerations,
//! references in circles, ambiguous grammars, terminals that exclude each other, and what else multiplies.

use std::fmt::Write as _;

use refrain_protocol::engine::TextForm;
use serde_json::{Map, Value, json};

/// A form that is built to cost much.
#[derive(Clone, Debug)]
pub struct HostileForm {
    /// The name of its kind, which says where its cost is.
    pub kind: &'static str,
    /// The form.
    pub text: TextForm,
}

/// A stream of numbers from a seed, by splitmix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn from(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// A number of about any size up to 10 to the power of `digits`.
    fn wide(&mut self, digits: u32) -> u64 {
        let digits = self.from(1, digits.into()) as u32;
        self.from(1, 10u64.pow(digits))
    }

    fn one_of<'a>(&mut self, texts: &[&'a str]) -> &'a str {
        texts[self.below(texts.len() as u64) as usize]
    }
}

type Maker = fn(&mut Numbers) -> TextForm;

const MAKERS: [(&str, Maker); 18] = [
    ("nested_repetition_regex", nested_repetition_regex),
    ("nested_repetition_ebnf", nested_repetition_ebnf),
    ("look_around", look_around),
    ("string_bounds", string_bounds),
    ("array_bounds", array_bounds),
    ("enumeration", enumeration),
    ("references", references),
    ("ambiguous_grammar", ambiguous_grammar),
    ("nullable_grammar", nullable_grammar),
    ("deep_alternatives", deep_alternatives),
    ("pattern_properties", pattern_properties),
    ("multiple_of", multiple_of),
    ("alternation", alternation),
    ("unicode_classes", unicode_classes),
    ("excluding_terminals", excluding_terminals),
    ("many_properties", many_properties),
    ("number_bounds", number_bounds),
    ("long_rules", long_rules),
];

/// Some of these forms, all kinds in turn. The same seed gives the same forms.
pub fn hostile_forms(seed: u64, count: usize) -> Vec<HostileForm> {
    let mut numbers = Numbers(seed);
    let kinds = MAKERS.iter().cycle().take(count);
    kinds
        .map(|(kind, make)| HostileForm {
            kind,
            text: make(&mut numbers),
        })
        .collect()
}

fn schema(schema: &Value) -> TextForm {
    TextForm::JsonSchema(schema.to_string())
}

fn nested_repetition_regex(numbers: &mut Numbers) -> TextForm {
    let mut regex = numbers
        .one_of(&["a", "[a-z]", "(a|b|ab)", "\\w", ".", "(a|aa)+"])
        .to_owned();
    for _ in 0..numbers.from(1, 5) {
        let most = numbers.wide(3);
        let least = numbers.below(most);
        regex = format!("({regex}){{{least},{most}}}");
    }
    TextForm::Regex(regex)
}

fn nested_repetition_ebnf(numbers: &mut Numbers) -> TextForm {
    let mut body = numbers
        .one_of(&["\"a\"", "[a-z]", "(\"a\" | \"ab\")", "x"])
        .to_owned();
    for _ in 0..numbers.from(1, 5) {
        let most = numbers.wide(3);
        let least = numbers.from(1, most);
        body = format!("({body}){{{least},{most}}}");
    }
    TextForm::Ebnf(format!("root ::= {body}\nx ::= \"(\" x? \")\""))
}

fn look_around(numbers: &mut Numbers) -> TextForm {
    let sign = numbers.one_of(&["?=", "?!", "?<=", "?<!"]);
    let most = numbers.wide(3);
    TextForm::Regex(format!("({sign}a{{1,{most}}})[a-z]{{1,{most}}}"))
}

fn string_bounds(numbers: &mut Numbers) -> TextForm {
    let most = numbers.wide(9);
    let least = numbers.below(most);
    let pattern = numbers.one_of(&["^.*$", "^(a|b)*a(a|b){12}$", "^(ab?)+$", "x"]);
    schema(&json!({"type": "string", "minLength": least, "maxLength": most, "pattern": pattern}))
}

fn array_bounds(numbers: &mut Numbers) -> TextForm {
    let mut inner = json!({"type": numbers.one_of(&["string", "integer", "null"])});
    for _ in 0..numbers.from(1, 4) {
        let most = numbers.wide(6);
        let least = numbers.below(most);
        inner = json!({"type": "array", "items": inner, "minItems": least, "maxItems": most});
    }
    schema(&inner)
}

fn enumeration(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(500, 6_000);
    let long = numbers.below(24) as usize;
    let texts = (0..count).map(|_| format!("{:x}{}", numbers.next(), "x".repeat(long)));
    let texts: Vec<String> = texts.collect();
    match count % 2 {
        0 => schema(&json!({"enum": texts})),
        _ => TextForm::Choice(texts),
    }
}

fn references(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(2, 400);
    let mut definitions = Map::new();
    for number in 0..count {
        let (one, other) = (numbers.below(count), numbers.below(count));
        let (one, other) = (format!("#/$defs/d{one}"), format!("#/$defs/d{other}"));
        let definition = match numbers.below(4) {
            0 => json!({"$ref": one}),
            1 => json!({"anyOf": [{"$ref": one}, {"$ref": other}]}),
            2 => json!({"allOf": [{"$ref": one}, {"$ref": other}]}),
            _ => {
                json!({"type": "object", "properties": {"a": {"$ref": one}, "b": {"$ref": other}}})
            }
        };
        definitions.insert(format!("d{number}"), definition);
    }
    schema(&json!({"$ref": "#/$defs/d0", "$defs": definitions}))
}

/// Rules that refer to themselves at the left, at the right, or at both ends.
fn ambiguous_grammar(numbers: &mut Numbers) -> TextForm {
    let mut rules = String::new();
    let count = numbers.from(1, 6);
    for rule in 0..count {
        let _ = write!(rules, "\ns{rule}: \"a\" | \"b\"");
        for _ in 0..numbers.from(1, 4) {
            let names = (0..numbers.from(1, 3)).map(|_| format!("s{}", numbers.below(count)));
            let names: Vec<String> = names.collect();
            let end = numbers.one_of(&["", " \"a\"", " \"c\""]);
            let _ = write!(rules, " | s{rule} {}{end}", names.join(" "));
        }
    }
    TextForm::Lark(format!("start: s0{rules}"))
}

fn nullable_grammar(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(2, 40);
    let mut rules = String::new();
    for rule in 0..count {
        let names = (0..numbers.from(1, 8)).map(|_| format!("r{}?", numbers.below(count)));
        let names: Vec<String> = names.collect();
        let _ = write!(rules, "\nr{rule}: \"a\"? {} | \"b\"", names.join(" "));
    }
    TextForm::Lark(format!("start: r0{rules}"))
}

fn deep_alternatives(numbers: &mut Numbers) -> TextForm {
    let mut inner = json!({"type": "integer"});
    for depth in 0..numbers.from(2, 60) {
        let other = json!({"properties": {format!("p{depth}"): {"type": "string"}}});
        inner = match numbers.below(3) {
            0 => json!({"anyOf": [inner, other]}),
            1 => json!({"allOf": [inner, {"type": ["object", "integer"]}]}),
            _ => json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
        };
    }
    let count = numbers.from(1, 10) as usize;
    schema(&json!({"allOf": vec![json!({"anyOf": [inner, {"type": "null"}]}); count]}))
}

fn pattern_properties(numbers: &mut Numbers) -> TextForm {
    let mut patterns = Map::new();
    for number in 0..numbers.from(1, 20) {
        let length = numbers.from(1, 30);
        patterns.insert(
            format!("^(a|b)*{number}(a|b){{{length}}}$"),
            json!({"type": "integer"}),
        );
    }
    schema(&json!({"type": "object", "patternProperties": patterns}))
}

fn multiple_of(numbers: &mut Numbers) -> TextForm {
    let mut parts = Vec::new();
    for _ in 0..numbers.from(1, 4) {
        let number = match numbers.below(4) {
            0 => json!(numbers.wide(4) as f64 / 1_000.0),
            _ => json!(numbers.wide(7)),
        };
        parts.push(json!({"type": "number", "multipleOf": number}));
    }
    let keyword = numbers.one_of(&["allOf", "anyOf"]);
    schema(&json!({keyword: parts}))
}

fn alternation(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(100, 3_000);
    let words = (0..count).map(|_| format!("{:x}", numbers.next() >> numbers.below(48)));
    let words: Vec<String> = words.collect();
    let most = numbers.from(1, 40);
    TextForm::Regex(format!("(({}) ?){{1,{most}}}", words.join("|")))
}

fn unicode_classes(numbers: &mut Numbers) -> TextForm {
    let class = numbers.one_of(&[
        "\\p{L}",
        "\\p{Greek}",
        "[^\\p{Lu}]",
        "(?i)[k-s]",
        "\\PN",
        "\\X",
    ]);
    let most = numbers.wide(4);
    TextForm::Regex(format!(
        "({class}{{1,{most}}}-){{1,{}}}",
        numbers.from(1, 99)
    ))
}

/// Terminals of which both must hold, and which may exclude each other far from their beginning.
fn excluding_terminals(numbers: &mut Numbers) -> TextForm {
    let first = numbers.one_of(&["\"d\"", "/[d-f]/", "/x*d/"]);
    let most = numbers.wide(3);
    let terminals = (0..numbers.from(2, 4)).map(|_| match numbers.below(3) {
        0 => format!("/(a|b)*a(a|b){{{}}}/", numbers.from(1, 28)),
        _ => format!("/(a{{{}}})+/", numbers.from(1, most)),
    });
    let terminals: Vec<String> = terminals.collect();
    TextForm::Lark(format!(
        "start: T\nT: \"c\" | {first} ({})",
        terminals.join(" & ")
    ))
}

fn many_properties(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(50, 2_000);
    let mut properties = Map::new();
    for number in 0..count {
        let kind = numbers.one_of(&["string", "integer", "boolean", "object", "array"]);
        properties.insert(format!("property_{number}"), json!({"type": kind}));
    }
    let required: Vec<String> = match numbers.below(2) {
        0 => Vec::new(),
        _ => properties
            .keys()
            .take(count as usize / 2)
            .cloned()
            .collect(),
    };
    schema(&json!({"type": "object", "properties": properties, "required": required}))
}

fn number_bounds(numbers: &mut Numbers) -> TextForm {
    let (one, other) = (numbers.wide(15), numbers.wide(15));
    let kind = numbers.one_of(&["integer", "number"]);
    let multiple = numbers.wide(5);
    schema(&json!({
        "type": kind, "minimum": one.min(other), "maximum": one.max(other), "multipleOf": multiple,
    }))
}

/// Many rules of two parts for the same text.
fn long_rules(numbers: &mut Numbers) -> TextForm {
    let count = numbers.from(8, 60);
    let mut rules = "\ns1: \"a\"".to_owned();
    for rule in 2..=count {
        let parts = (1..rule).map(|part| format!("s{part} s{}", rule - part));
        let parts: Vec<String> = parts.collect();
        let _ = write!(rules, "\ns{rule}: {}", parts.join(" | "));
    }
    let end = numbers.one_of(&["", " \"b\"", " start?"]);
    TextForm::Lark(format!("start: s{count}{end}{rules}"))
}
