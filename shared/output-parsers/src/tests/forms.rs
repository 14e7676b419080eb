//! A family reads all that its form allows: random outputs of the form become calls with valid arguments.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use refrain_output_grammar::{GrammarCompiler, GrammarLimits, Matcher};
use refrain_protocol::engine::{OutputForm, TextForm};
use refrain_tokenization::{ModelFiles, Tokenizer};
use serde_json::{Value, json};

use crate::{
    CallsWanted, Delivery, Event, NoForm, OutputParser, ParserOptions, Piece, ReasoningParserKind,
    Tool, ToolParserKind, answer_form, calls_form,
};

/// All formats of calls: the first kind is none.
const KINDS: &[ToolParserKind] = super::chunkings::KINDS.split_at(1).1;

struct Model {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    end: u32,
    /// Tokens that end strings, lists and tags, so that a random output ends.
    closers: Vec<u32>,
}

/// The model that the repository ships. None of the markers is one of its tokens, so all of them are text.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../services/reference-engine/model");
    let tokenizer = Arc::new(ModelFiles::from_dir(folder).unwrap().tokenizer().unwrap());
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let compiler = compiler(&tokenizer, end, GrammarLimits::default());
    let one = |text: &str| match tokenizer.encode(text).unwrap()[..] {
        [token] => Some(token),
        _ => None,
    };
    let texts = ["\"", "}", "]", ")", "<", "/", "\n", ",", ".", "1"];
    Model {
        closers: texts.iter().filter_map(|text| one(text)).collect(),
        tokenizer,
        compiler,
        end,
    }
});

/// A stream of numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        let factor = 6_364_136_223_846_793_005;
        self.0 = self
            .0
            .wrapping_mul(factor)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound.max(1)
    }
}

/// Writes an output of tokens that the form allows. `None` if it did not end in time.
fn walk(matcher: &mut Matcher, dice: &mut Dice) -> Option<String> {
    let mut output = Vec::new();
    while output.len() < 400 {
        let Some(allowed) = matcher.allowed().unwrap() else {
            // Free text may end here.
            return Some(MODEL.tokenizer.decode(&output));
        };
        let allowed: Vec<u32> = allowed.iter().collect();
        let closer = MODEL.closers.iter().find(|token| allowed.contains(token));
        let token = match closer {
            _ if allowed.contains(&MODEL.end) && dice.below(3) > 0 => MODEL.end,
            Some(closer) if dice.below(3) == 0 => *closer,
            _ => allowed[dice.below(allowed.len())],
        };
        matcher.advance(&[token]).unwrap();
        if token == MODEL.end {
            return Some(MODEL.tokenizer.decode(&output));
        }
        output.push(token);
    }
    None
}

fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.to_owned(),
        parameters,
    };
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 12},
                "days": {"type": "integer", "minimum": 0, "maximum": 14},
                "unit": {"enum": ["celsius", "kelvin"]},
                "exact": {"type": "boolean"},
                "where": {"$ref": "#/$defs/place"},
                "note": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
            }, "required": ["city", "days"], "additionalProperties": false,
            "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}},
                "required": ["lat"], "additionalProperties": false}}}),
        ),
        tool(
            "find",
            json!({"type": "object", "properties": {
                "text": {"type": "string"},
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            }, "additionalProperties": false}),
        ),
        tool("stop", Value::Null),
    ]
}

/// The calls of an output, and its text.
fn parsed(kind: ToolParserKind, tools: &[Tool], output: &str) -> (Vec<(String, Value)>, String) {
    let options = ParserOptions {
        tools_as: kind,
        tools: tools.to_vec(),
        delivery: Delivery::Whole,
        ..ParserOptions::default()
    };
    let mut parser = OutputParser::new(options, |_| None);
    let mut events = Vec::new();
    parser.push(&[Piece::text(output)], &mut events);
    parser.finish(&mut events);
    let (mut calls, mut text) = (Vec::new(), String::new());
    for event in events {
        match event {
            Event::CallStart { name, .. } => calls.push((name, String::new())),
            Event::CallArguments { delta, .. } => calls.last_mut().unwrap().1.push_str(&delta),
            Event::CallEnd { intact, .. } => assert!(intact, "{output}"),
            Event::Text(part) => text.push_str(&part),
            Event::Reasoning(_) => {}
        }
    }
    let read = |(name, arguments): (String, String)| {
        let value = serde_json::from_str(&arguments);
        (
            name,
            value.unwrap_or_else(|error| panic!("{error}: {arguments} of {output}")),
        )
    };
    (calls.into_iter().map(read).collect(), text)
}

fn form(kind: ToolParserKind, tools: &[Tool], optional: bool, parallel: bool) -> TextForm {
    let wanted = CallsWanted {
        tools,
        optional,
        parallel,
        after_reasoning: false,
    };
    calls_form(kind, &wanted, &|_| false).unwrap()
}

fn compiler(tokenizer: &Arc<Tokenizer>, end: u32, limits: GrammarLimits) -> GrammarCompiler {
    GrammarCompiler::new(tokenizer.clone(), tokenizer.vocab_size(), &[end], limits).unwrap()
}

fn matcher(form: TextForm) -> Matcher {
    let form = OutputForm::new(form);
    MODEL.compiler.compile(&form).unwrap().matcher()
}

fn assert_valid(tools: &[Tool], calls: &[(String, Value)], output: &str) {
    for (name, arguments) in calls {
        let tool = tools.iter().find(|tool| tool.name == *name).unwrap();
        let schema = match &tool.parameters {
            Value::Null => json!({"maxProperties": 0}),
            schema => schema.clone(),
        };
        let judge = jsonschema::validator_for(&schema).unwrap();
        assert!(judge.is_valid(arguments), "{arguments} of {output}");
    }
}

#[test]
fn forced_calls_are_read_and_valid() {
    let tools = tools();
    for &kind in KINDS {
        let mut ended = 0;
        for seed in 0..24 {
            let parallel = seed % 2 == 0;
            let Some(output) = walk(
                &mut matcher(form(kind, &tools, false, parallel)),
                &mut Dice(seed),
            ) else {
                continue;
            };
            ended += 1;
            let (calls, text) = parsed(kind, &tools, &output);
            assert!(!calls.is_empty(), "{kind}: {output}");
            assert!(parallel || calls.len() == 1, "{kind}: {output}");
            assert_eq!(text.trim(), "", "{kind}: {output}");
            assert_valid(&tools, &calls, &output);
        }
        assert!(ended >= 12, "{kind}: only {ended} outputs ended");
    }
}

#[test]
fn optional_calls_are_valid_where_the_model_makes_them() {
    let tools = tools();
    for &kind in KINDS {
        let calls = form(kind, &tools, false, false);
        let optional = form(kind, &tools, true, false);
        for seed in 0..6 {
            let Some(output) = walk(&mut matcher(calls.clone()), &mut Dice(seed)) else {
                continue;
            };
            // The same call is allowed, and so is an answer.
            let mut free = matcher(optional.clone());
            let tokens = MODEL.tokenizer.encode(&output).unwrap();
            let taken = free.advance_while_allowed(&tokens).unwrap();
            assert!(
                taken == tokens.len() && free.may_end().unwrap(),
                "{kind}: {output}"
            );
        }
        let answer = match kind {
            ToolParserKind::Harmony => "<|channel|>final<|message|>It is 7 < 8.",
            _ => "It is 7 < 8.",
        };
        let mut free = matcher(optional);
        let tokens = MODEL.tokenizer.encode(answer).unwrap();
        let taken = free.advance_while_allowed(&tokens).unwrap();
        assert!(taken == tokens.len() && free.may_end().unwrap(), "{kind}");
    }
}

/// Calls with the text of their arguments, and the text of an output that ends here.
fn cut_off(
    kind: ToolParserKind,
    tools: &[Tool],
    output: &str,
    delivery: Delivery,
) -> (Vec<(String, String)>, String) {
    let options = ParserOptions {
        tools_as: kind,
        tools: tools.to_vec(),
        delivery,
        calls_are_bound: true,
        ..ParserOptions::default()
    };
    let mut parser = OutputParser::new(options, |_| None);
    let mut events = Vec::new();
    parser.push(&[Piece::text(output)], &mut events);
    let counts = parser.finish(&mut events);
    let (mut calls, mut text, mut ended) = (Vec::new(), String::new(), 0);
    for event in events {
        match event {
            Event::CallStart { name, .. } => calls.push((name, String::new())),
            Event::CallArguments { delta, .. } => calls.last_mut().unwrap().1.push_str(&delta),
            Event::CallEnd { .. } => ended += 1,
            Event::Text(part) => text.push_str(&part),
            Event::Reasoning(_) => {}
        }
    }
    assert_eq!(
        (calls.len(), counts.calls as usize),
        (ended, ended),
        "{output}"
    );
    (calls, text)
}

#[test]
fn a_bound_call_that_is_cut_off_comes_with_what_there_is_of_it() {
    let all = tools();
    for &kind in KINDS {
        for (seed, tools) in [(3, &all[..]), (4, &all[..1]), (5, &all[1..2])] {
            let calls = form(kind, tools, false, false);
            let walked = |seed| walk(&mut matcher(calls.clone()), &mut Dice(seed));
            let output = (seed..).find_map(walked).unwrap();
            let (whole, _) = cut_off(kind, tools, &output, Delivery::Whole);
            let [(name, arguments)] = &whole[..] else {
                panic!("{kind}: {output}");
            };
            let mut known = 0;
            for end in (0..output.len()).filter(|end| output.is_char_boundary(*end)) {
                let cut = &output[..end];
                let (calls, text) = cut_off(kind, tools, cut, Delivery::Whole);
                // The same comes in a stream.
                let streamed = cut_off(kind, tools, cut, Delivery::Streamed);
                assert_eq!((&calls, &text), (&streamed.0, &streamed.1), "{kind}: {cut}");
                let Some((cut_name, cut_arguments)) = calls.first() else {
                    assert_eq!(known, 0, "{kind}: {cut}");
                    continue;
                };
                known += 1;
                assert_eq!(
                    (cut_name, &*text, calls.len()),
                    (name, "", 1),
                    "{kind}: {cut}"
                );
                assert!(
                    arguments.starts_with(cut_arguments.as_str()),
                    "{kind}: {cut_arguments} of {arguments}"
                );
            }
            // From the arguments on at the latest.
            assert!(
                known + 1 >= arguments.len().min(9),
                "{kind}: {known} of {output}"
            );
        }
    }
}

#[test]
fn without_a_form_a_call_that_is_cut_off_is_text() {
    let output = "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"text\": \"a";
    let (calls, text) = parsed(ToolParserKind::Hermes, &tools(), output);
    assert_eq!((calls.len(), &*text), (0, output));
    let (calls, text) = cut_off(ToolParserKind::Hermes, &tools(), output, Delivery::Whole);
    let arguments = "{\"text\": \"a".to_owned();
    assert_eq!((calls, &*text), (vec![("find".to_owned(), arguments)], ""));
    // The name of one tool is the beginning of another's, so it is not known yet.
    let two: Vec<Tool> = ["find", "find_all"]
        .map(|name| Tool {
            name: name.into(),
            parameters: Value::Null,
        })
        .into();
    let begun = "<tool_call>\n{\"name\": \"find";
    assert_eq!(
        cut_off(ToolParserKind::Hermes, &two, begun, Delivery::Whole),
        (Vec::new(), begun.to_owned())
    );
    let named = format!("{begun}_all\", \"argum");
    let (calls, text) = cut_off(ToolParserKind::Hermes, &two, &named, Delivery::Whole);
    assert_eq!(
        (calls, &*text),
        (vec![("find_all".to_owned(), String::new())], "")
    );
}

/// Agents send tools and a form of the answer in one request.
#[test]
fn an_output_is_calls_or_an_answer_of_the_form() {
    let tools = tools();
    let answer = TextForm::JsonSchema(
        json!({"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9},
            "name": {"type": "string", "maxLength": 9}, "find": {"const": "find"}},
            "required": ["days"], "additionalProperties": false})
        .to_string(),
    );
    for &kind in KINDS {
        let calls = form(kind, &tools, false, true);
        let answer = answer_form(kind, answer.clone(), false).unwrap();
        let either = TextForm::AnyOf(vec![calls.clone(), answer.clone()]);
        let head = match kind {
            ToolParserKind::Harmony => "<|channel|>final<|message|>",
            _ => "",
        };
        for good in [
            "{\"days\": 7}",
            "{\"days\": 7, \"name\": \"find\"}",
            "{\"days\": 7, \"find\": \"find\"}",
        ] {
            assert!(allows(&either, &format!("{head}{good}")), "{kind}: {good}");
        }
        for other in ["It is 7.", "{\"days\": 10}", "{\"days\": 7} and", "{}"] {
            assert!(
                !allows(&either, &format!("{head}{other}")),
                "{kind}: {other}"
            );
        }
        let (mut read, mut answers) = (0, 0);
        for seed in 0..12 {
            if let Some(output) = walk(&mut matcher(calls.clone()), &mut Dice(seed)) {
                assert!(allows(&either, &output), "{kind}: {output}");
                let (calls, text) = parsed(kind, &tools, &output);
                assert_valid(&tools, &calls, &output);
                assert!(
                    !calls.is_empty() && text.trim().is_empty(),
                    "{kind}: {output}"
                );
                read += 1;
            }
            // An answer never looks like a call, although both may begin with the same character.
            if let Some(output) = walk(&mut matcher(answer.clone()), &mut Dice(seed)) {
                let (calls, text) = parsed(kind, &tools, &output);
                assert!(calls.is_empty(), "{kind}: {output}");
                let value: Value = serde_json::from_str(&text).unwrap();
                assert!(value["days"].is_u64(), "{kind}: {output}");
                answers += 1;
            }
        }
        assert!(read > 5 && answers > 5, "{kind}: {read}, {answers}");
    }
}

#[test]
fn arguments_that_are_not_bound_are_any_object() {
    let tools = [Tool {
        name: "f".into(),
        parameters: json!({"type": "object"}),
    }];
    for kind in KINDS
        .iter()
        .copied()
        .filter(|kind| *kind != ToolParserKind::Pythonic)
    {
        for seed in 0..4 {
            if let Some(output) = walk(
                &mut matcher(form(kind, &tools, false, false)),
                &mut Dice(seed),
            ) {
                let (calls, _) = parsed(kind, &tools, &output);
                assert_eq!(calls.len(), 1, "{kind}: {output}");
                assert!(calls[0].1.is_object(), "{kind}: {output}");
            }
        }
    }
}

#[test]
fn what_a_format_cannot_say_is_refused_with_its_tool() {
    let refused = |kind, tool: Tool| -> NoForm {
        let wanted = CallsWanted {
            tools: &[tool],
            optional: false,
            parallel: true,
            after_reasoning: false,
        };
        calls_form(kind, &wanted, &|_| false).unwrap_err()
    };
    let tool = |name: &str, parameters: Value| Tool {
        name: name.into(),
        parameters,
    };
    let any = json!({"type": "object"});
    let either = json!({"anyOf": [{"type": "object"}]});
    let mixed = json!({"properties": {"a": {"enum": ["x", 1]}}});
    for (kind, tool) in [
        (ToolParserKind::Pythonic, tool("get-weather", any.clone())),
        (ToolParserKind::Pythonic, tool("f", any.clone())),
        (ToolParserKind::DeepSeekV31, tool("f<g>", any.clone())),
        (ToolParserKind::Qwen3Coder, tool("f", either.clone())),
        (ToolParserKind::Glm45, tool("f", either)),
        (ToolParserKind::Qwen3Coder, tool("f", mixed)),
        (
            ToolParserKind::Qwen3Coder,
            tool("f", json!({"additionalProperties": {"type": "integer"}})),
        ),
    ] {
        let name = tool.name.clone();
        assert_eq!(refused(kind, tool).tool, Some(name), "{kind}");
    }
    assert_eq!(refused(ToolParserKind::None, tool("f", any)).tool, None);
}

/// The form of one tool with parameters that share definitions, or why it has none.
fn shared_form(kind: ToolParserKind, count: usize, definition: &Value) -> Result<TextForm, NoForm> {
    let property = |n: usize| (format!("p{n}"), json!({"$ref": "#/$defs/used"}));
    let properties: serde_json::Map<String, Value> = (0..count).map(property).collect();
    let parameters = json!({"type": "object", "properties": properties,
    "required": ["p0"], "$defs": {
        "used": {"anyOf": [definition, {"type": "array", "items": {"$ref": "#/$defs/used"}}]},
        "unused": {"const": "x".repeat(500)},
    }});
    let tool = Tool {
        name: "f".into(),
        parameters,
    };
    let wanted = CallsWanted {
        tools: &[tool],
        optional: false,
        parallel: false,
        after_reasoning: false,
    };
    calls_form(kind, &wanted, &|_| false)
}

#[test]
fn copies_of_definitions_are_bounded() {
    let large = json!({"const": "x".repeat(2_000)});
    for kind in [
        ToolParserKind::Qwen3Coder,
        ToolParserKind::Glm45,
        ToolParserKind::Pythonic,
    ] {
        // Only what a parameter refers to goes with it.
        let form = shared_form(kind, 3, &json!({"type": "integer"})).unwrap();
        assert!(form.text_bytes() < 1_000, "{kind}: {}", form.text_bytes());
        MODEL.compiler.compile(&OutputForm::new(form)).unwrap();
        let error = shared_form(kind, 2_000, &large).unwrap_err();
        assert_eq!(error.tool.as_deref(), Some("f"), "{kind}");
        assert!(error.fault.contains("bytes"), "{kind}: {error}");
    }
    // Several tools count together.
    let name = |n: usize| format!("f{n}");
    let tools: Vec<Tool> = (0..600)
        .map(|n| Tool {
            name: name(n),
            parameters: json!({"properties": {"a": large}}),
        })
        .collect();
    let wanted = CallsWanted {
        tools: &tools,
        optional: false,
        parallel: false,
        after_reasoning: false,
    };
    let error = calls_form(ToolParserKind::Hermes, &wanted, &|_| false).unwrap_err();
    assert!(error.fault.contains("bytes"), "{error}");
}

#[test]
fn a_function_with_many_optional_parameters_alone_is_refused_in_python() {
    let tool = |count: usize| {
        let property = |n: usize| (format!("p{n}"), json!({"type": "integer"}));
        let properties: serde_json::Map<String, Value> = (0..count).map(property).collect();
        Tool {
            name: "f".into(),
            parameters: json!({"properties": properties}),
        }
    };
    for (count, is_possible) in [(64, true), (65, false), (3_000, false)] {
        let wanted = CallsWanted {
            tools: &[tool(count)],
            optional: false,
            parallel: false,
            after_reasoning: false,
        };
        let form = calls_form(ToolParserKind::Pythonic, &wanted, &|_| false);
        assert_eq!(form.is_ok(), is_possible, "{count}");
    }
}

/// Whether a form allows all of this text and an end after it, with as much work as that takes.
fn allows(form: &TextForm, text: &str) -> bool {
    let limits = GrammarLimits {
        mask_fuel: u64::MAX,
        ..GrammarLimits::default()
    };
    let compiler = compiler(&MODEL.tokenizer, MODEL.end, limits);
    let form = OutputForm::new(form.clone());
    let mut matcher = compiler.compile(&form).unwrap().matcher();
    let tokens = MODEL.tokenizer.encode(text).unwrap();
    let taken = matcher.advance_while_allowed(&tokens).unwrap();
    taken == tokens.len() && matcher.may_end().unwrap()
}

#[test]
fn strings_without_quotes_are_held_to_their_length_and_may_have_any_text() {
    let tool = |string: Value| Tool {
        name: "f".into(),
        parameters: json!({"properties": {"text": string}, "required": ["text"]}),
    };
    let written = |text: &str| {
        format!(
            "<tool_call>\n<function=f>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    let long = [tool(json!({"type": "string", "maxLength": 10_000}))];
    let long = form(ToolParserKind::Qwen3Coder, &long, false, false);
    assert!(allows(&long, &written("if a < b { <b>c</b> }")));
    assert!(!allows(&long, &written("a\n</parameter>\n")));
    let bounded = [tool(json!({"type": "string", "maxLength": 64}))];
    let bounded = form(ToolParserKind::Qwen3Coder, &bounded, false, false);
    assert!(allows(&bounded, &written("if a < b { <b>c</b> }")));
    assert!(!allows(&bounded, &written(&"a".repeat(65))));
    let short = [tool(json!({"type": "string", "maxLength": 3}))];
    let short = form(ToolParserKind::Qwen3Coder, &short, false, false);
    assert!(allows(&short, &written("abc")));
    assert!(allows(&short, &written("a<b")));
    assert!(!allows(&short, &written("abcd")));
}

#[test]
fn answers_beside_unmarked_calls_may_begin_with_white_space() {
    for (kind, first) in [
        (ToolParserKind::Llama3Json, "{"),
        (ToolParserKind::Pythonic, "["),
    ] {
        let form = form(kind, &tools(), true, false);
        for answer in ["", " Hello.", "\n\nHello [1] {2}."] {
            assert!(allows(&form, answer), "{kind}: {answer:?}");
        }
        assert!(!allows(&form, &format!(" {first}\"a\"")), "{kind}");
    }
}

#[test]
fn harmony_binds_an_output_that_does_not_reason() {
    let forced = form(ToolParserKind::Harmony, &tools(), false, false);
    let answer = answer_form(ToolParserKind::Harmony, TextForm::JsonObject, false).unwrap();
    let call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}";
    let object = "<|channel|>final<|message|>{}";
    let reasoning = "<|channel|>analysis<|message|>I think. < it <|end|><|start|>assistant";
    for (form, text) in [(&forced, call), (&answer, object)] {
        assert!(allows(form, text), "{text}");
        assert!(allows(form, &format!("{reasoning}{text}")), "{text}");
        for other in [
            "<|channel|>final<|message|>no json",
            "<|channel|>analysis<|message|>I think.",
            "no json",
        ] {
            assert!(!allows(form, other), "{other}");
            assert!(!allows(form, &format!("{reasoning}{other}")), "{other}");
        }
    }
}

#[test]
fn answers_of_harmony_have_their_head() {
    let text = TextForm::Choice(vec!["yes".into(), "no".into()]);
    let plain = answer_form(ToolParserKind::Hermes, text.clone(), true).unwrap();
    assert_eq!(plain, text);
    for (after_reasoning, head) in [
        (false, "<|channel|>final<|message|>"),
        (true, "<|start|>assistant<|channel|>final<|message|>"),
    ] {
        let form = answer_form(ToolParserKind::Harmony, text.clone(), after_reasoning).unwrap();
        let output = walk(&mut matcher(form), &mut Dice(1)).unwrap();
        let answer = output.strip_prefix(head).unwrap();
        assert!(["yes", "no"].contains(&answer), "{output}");
    }
    let lark = TextForm::Lark("start: \"a\"".into());
    assert!(answer_form(ToolParserKind::Harmony, lark, true).is_err());
}

#[test]
fn the_end_of_the_reasoning_is_a_marker() {
    for (name, end) in [
        ("qwen3", Some("</think>")),
        ("harmony", Some("<|end|>")),
        ("none", None),
    ] {
        let kind: ReasoningParserKind = name.parse().unwrap();
        assert_eq!(kind.end_marker(), end);
    }
}
