//! Forms of outputs: what a worker is asked for, and how the answers to forced calls end.

use std::sync::Arc;

use refrain_gateway::{GatewayConfig, ModelConfig};
use refrain_output_grammar::{GrammarCompiler, GrammarLimits};
use refrain_protocol::engine::{ArgumentsForm, CallsForm, OutputForm, TextForm};
use refrain_tokenization::testing::byte_level_files;
use serde_json::{Value, json};

use crate::mesh::{Bench, WITH_TOOLS, chat, config};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn with_tools() -> GatewayConfig {
    let mut config = config();
    config.models = vec![ModelConfig {
        id: "tiny".into(),
        files: WITH_TOOLS.into(),
        tool_parser: Some("hermes".into()),
        ..ModelConfig::default()
    }];
    config
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
}

/// The schema with closed objects, as a worker is asked for it.
fn closed() -> Value {
    let mut schema = schema();
    schema["additionalProperties"] = json!(false);
    schema
}

fn tool(name: &str, strict: bool) -> Value {
    json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": schema()}})
}

/// The form that a worker was asked for last.
fn asked(bench: &Bench) -> Option<OutputForm> {
    let log = bench.mesh.log();
    let form = log.chunks.last().unwrap().sampling.form.as_deref();
    form.cloned()
}

fn calls(form: Option<OutputForm>) -> CallsForm {
    match form.unwrap().text {
        TextForm::Calls(form) => form,
        other => panic!("{other:?}"),
    }
}

/// The schema of the arguments of each call.
fn arguments(form: &CallsForm) -> Vec<Value> {
    let schemas = form.calls.iter().map(|call| match &call.arguments {
        ArgumentsForm::JsonSchema(schema) => serde_json::from_str(schema).unwrap(),
        other => panic!("{other:?}"),
    });
    schemas.collect()
}

#[tokio::test]
async fn every_api_asks_the_worker_for_the_form() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply("{}");
    let json_schema = TextForm::JsonSchema(closed().to_string());
    let message = |fields: Value| {
        let mut body = chat(fields);
        body["max_tokens"] = json!(20);
        body
    };
    let format = json!({"type": "json_schema", "schema": schema()});
    for (path, body, text) in [
        (
            CHAT,
            chat(json!({"response_format": {"type": "json_object"}})),
            TextForm::JsonObject,
        ),
        (
            CHAT,
            chat(json!({"response_format": {"type": "json_schema",
                "json_schema": {"name": "n", "schema": schema()}}})),
            json_schema.clone(),
        ),
        (
            CHAT,
            chat(json!({"guided_regex": "a+"})),
            TextForm::Regex("a+".into()),
        ),
        (
            TEXT,
            json!({"model": "tiny", "prompt": "a", "structured_outputs": {"choice": ["a"]}}),
            TextForm::Choice(vec!["a".into()]),
        ),
        (
            "/v1/responses",
            json!({"model": "tiny", "input": "a", "text": {"format": {"type": "json_schema",
                "name": "n", "schema": schema()}}}),
            json_schema.clone(),
        ),
        (
            "/v1/messages",
            message(json!({"output_config": {"format": format}})),
            json_schema.clone(),
        ),
        (
            "/v1/messages",
            message(json!({"output_format": format})),
            json_schema,
        ),
    ] {
        let (status, answer) = bench.json(path, &body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(asked(&bench), Some(OutputForm::new(text)), "{body}");
    }
    let (status, _) = bench
        .chat(json!({"response_format": {"type": "text"}}))
        .await;
    assert_eq!((status, asked(&bench)), (200, None));
}

#[tokio::test]
async fn forced_calls_are_a_form_and_end_as_with_openai() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply(
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
    );
    let tools = json!([tool("look", false), tool("send", false)]);
    let named = json!({"type": "function", "function": {"name": "look"}});
    for (choice, callable, parallel, finish) in [
        (json!("required"), 2, true, "tool_calls"),
        (named, 1, false, "stop"),
        (
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("look", false)]}}),
            1,
            true,
            "tool_calls",
        ),
    ] {
        let mut body = chat(json!({"tools": tools, "tool_choice": choice}));
        let (status, answer) = bench.json(CHAT, &body).await;
        assert_eq!(status, 200, "{answer}");
        let form = calls(asked(&bench));
        assert_eq!(
            (form.optional, form.parallel),
            (false, parallel),
            "{choice}"
        );
        // A client that forces a call can use no other arguments, whether it says strict or not.
        assert_eq!(arguments(&form), vec![closed(); callable]);
        let first = &answer["choices"][0];
        assert_eq!(first["finish_reason"], finish, "{choice}");
        assert_eq!(first["message"]["content"], Value::Null);
        let function = &first["message"]["tool_calls"][0]["function"];
        assert_eq!(
            function,
            &json!({"name": "look", "arguments": "{\"city\": \"Oslo\"}"})
        );
        body["stream"] = json!(true);
        let (events, done) = bench.stream(CHAT, &body).await;
        let finishes = events
            .iter()
            .filter_map(|event| event["choices"][0]["finish_reason"].as_str());
        assert_eq!((finishes.collect::<Vec<_>>(), done), (vec![finish], true));
    }
    let functions = json!([{"name": "look", "parameters": schema()}]);
    let body = chat(json!({"functions": functions, "function_call": {"name": "look"}}));
    let (_, answer) = bench.json(CHAT, &body).await;
    assert_eq!(calls(asked(&bench)).calls.len(), 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        answer["choices"][0]["message"]["function_call"]["name"],
        "look"
    );
}

#[tokio::test]
async fn the_other_apis_force_calls_as_well() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply(
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
    );
    let mut body = chat(json!({
        "tools": [{"name": "look", "input_schema": schema()}],
        "tool_choice": {"type": "tool", "name": "look"},
    }));
    body["max_tokens"] = json!(200);
    let (status, answer) = bench.json("/v1/messages", &body).await;
    assert_eq!(
        (status, &answer["stop_reason"]),
        (200, &json!("tool_use")),
        "{answer}"
    );
    assert!(!calls(asked(&bench)).parallel);
    let body = json!({"model": "tiny", "input": "a", "tool_choice": "required",
        "tools": [{"type": "function", "name": "look", "parameters": schema()}]});
    let (status, answer) = bench.json("/v1/responses", &body).await;
    assert_eq!(
        (status, &answer["output"][0]["type"]),
        (200, &json!("function_call")),
        "{answer}"
    );
    assert_eq!(arguments(&calls(asked(&bench))), [closed()]);
}

#[tokio::test]
async fn strict_functions_bind_their_arguments_where_the_model_calls_them() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply("Hi.");
    let any = json!({"type": "object"});
    let tools = json!([tool("look", true), tool("send", false)]);
    let (status, _) = bench.chat(json!({"tools": tools})).await;
    let form = calls(asked(&bench));
    assert_eq!((status, form.optional, form.parallel), (200, true, true));
    assert_eq!(arguments(&form), [closed(), any.clone()]);
    // Without a strict one nothing is bound.
    let loose = json!([tool("look", false)]);
    bench.chat(json!({"tools": loose})).await;
    assert_eq!(asked(&bench), None);
    // An answer with a form may be a call instead.
    let format = json!({"type": "json_object"});
    bench
        .chat(json!({"tools": loose, "response_format": format}))
        .await;
    let TextForm::AnyOf(forms) = asked(&bench).unwrap().text else {
        panic!("not one of several forms");
    };
    let [TextForm::Calls(form), TextForm::JsonObject] = &forms[..] else {
        panic!("{forms:?}");
    };
    assert_eq!((form.optional, arguments(form)), (false, vec![any]));
}

/// Waits until the gateway knows that all engines compile forms as it does.
async fn compile_forms(bench: &Bench) {
    bench.mesh.script().compiles_forms = true;
    let polls = bench.mesh.log().polls;
    while bench.mesh.log().polls < polls + 2 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_forced_call_does_without_a_schema_that_is_not_strict_and_cannot_be_compiled() {
    let bench = Bench::with(with_tools()).await;
    bench
        .mesh
        .reply("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>");
    compile_forms(&bench).await;
    let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let function = json!({"name": "f", "parameters": bad});
    let tools = json!([
        {"type": "function", "function": function},
        tool("look", true),
        tool("send", false),
    ]);
    let any = json!({"type": "object"});
    let (status, answer) = bench
        .chat(json!({"tools": tools, "tool_choice": "required"}))
        .await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        arguments(&calls(asked(&bench))),
        [any.clone(), closed(), any]
    );
}

/// Whether a form allows the whole text and then its end.
fn allows(form: &OutputForm, text: &str) -> bool {
    let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
    let (size, end) = (tokenizer.vocab_size(), tokenizer.token_id("<|im_end|>"));
    let limits = GrammarLimits::default();
    let compiler = GrammarCompiler::new(tokenizer.clone(), size, &[end.unwrap()], limits).unwrap();
    let mut matcher = compiler.compile(form).unwrap().matcher();
    let tokens = tokenizer.encode_trusted(text).unwrap();
    let allowed = matcher.advance_while_allowed(&tokens).unwrap();
    allowed == tokens.len() && matcher.may_end().unwrap()
}

#[tokio::test]
async fn the_text_of_a_custom_tool_is_held_to_its_grammar() {
    let bench = Bench::with(with_tools()).await;
    let call = |name: &str, input: &str| {
        let call = format!("{{\"input\": {}}}", json!(input));
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {call}}}\n</tool_call>")
    };
    let patch = "*** Begin Patch\n*** Add File: a\n+say \"hi\"\n*** End Patch";
    bench.mesh.reply(&call("apply_patch", patch));
    let custom = |name: &str, syntax: &str, definition: &str| {
        let format = json!({"type": "grammar", "syntax": syntax, "definition": definition});
        json!({"type": "custom", "name": name, "format": format})
    };
    let patches = custom(
        "apply_patch",
        "lark",
        "start: \"*** Begin Patch\" LF add+ \"*** End Patch\" LF?\n\
         add: \"*** Add File: \" /(.+)/ LF line+\n\
         line: \"+\" /(.*)/ LF -> line\n%import common.LF",
    );
    let digits = custom("digits", "regex", "^\\d+$");
    let nested = custom("nested", "lark", "start: \"(\" start? \")\"");
    let plain = json!({"type": "function", "name": "look", "parameters": schema()});
    let body = |tools: &[&Value], choice: Value| json!({"model": "tiny", "input": "a", "tools": tools, "tool_choice": choice});
    let ask = async |tools: &[&Value], choice: Value| {
        let (status, answer) = bench.json("/v1/responses", &body(tools, choice)).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["output"][0]["input"], patch, "{answer}");
        asked(&bench)
    };
    let tools = [&patches, &digits, &nested, &plain];
    // Other engines know other grammars.
    assert_eq!(ask(&tools, json!("auto")).await, None);
    compile_forms(&bench).await;
    let free = ask(&tools, json!("auto")).await.unwrap();
    let forced = ask(&tools, json!("required")).await.unwrap();
    let named = json!({"type": "custom", "name": "apply_patch"});
    let named = ask(&tools, named).await.unwrap();
    for form in [&free, &forced, &named] {
        assert!(allows(form, &call("apply_patch", patch)));
        for wrong in [
            "",
            "no",
            &patch[1..],
            &patch.replace("+", "-"),
            &patch[..patch.len() - 3],
        ] {
            assert!(!allows(form, &call("apply_patch", wrong)), "{wrong}");
        }
    }
    for (form, others) in [(&free, true), (&forced, true), (&named, false)] {
        assert_eq!(allows(form, &call("digits", "42")), others);
        assert!(!allows(form, &call("digits", "x")));
        assert_eq!(allows(form, &call("nested", "any")), others);
    }
    assert!(allows(&free, "Hi.") && !allows(&forced, "Hi."));
    // Nothing is held where no grammar can be, and nothing is refused.
    let odd = custom("apply_patch", "regex", "(?=a)b");
    let long = custom("apply_patch", "regex", &"a".repeat(20_000));
    let nested = custom("apply_patch", "lark", "start: \"(\" start? \")\"");
    for tool in [&nested, &odd, &long] {
        assert_eq!(ask(&[tool], json!("auto")).await, None, "{tool}");
    }
    let form = ask(&[&odd, &plain], json!("required")).await.unwrap();
    assert!(allows(&form, &call("apply_patch", "any")));
    // A schema that the client wants to hold is still refused with its place.
    let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let strict = json!({"type": "function", "name": "f", "parameters": bad, "strict": true});
    let body = body(&[&patches, &strict], json!("auto"));
    let (status, error) = bench.json("/v1/responses", &body).await;
    let param = error["error"]["param"].as_str();
    assert_eq!(
        (status, param),
        (400, Some("tools[1].parameters.properties.a.not")),
        "{error}"
    );
}

#[tokio::test]
async fn an_engine_that_cannot_hold_the_form_fails_by_the_clients_own_field() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply("{} and more");
    bench.mesh.script().step_tokens = 1;
    let format = json!({"type": "json_schema", "schema": schema()});
    for (number, (path, body, place)) in [
        (CHAT, chat(json!({"guided_regex": "a+"})), "guided_regex"),
        (
            "/v1/messages",
            chat(json!({"output_format": format, "max_tokens": 20})),
            "output_format.schema",
        ),
        (
            "/v1/messages",
            chat(json!({"output_config": {"format": format}, "max_tokens": 20})),
            "output_config.format.schema",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        bench.mesh.mishap(number, crate::mesh::Mishap::FailForm(0));
        let (status, error) = bench.json(path, &body).await;
        let said = error["error"]["message"].as_str().unwrap();
        assert_eq!((status, said), (400, &*format!("{place}: too complex")));
    }
    // In the middle of an output as well: the same request would fail again, so no other worker is asked.
    bench.mesh.mishap(3, crate::mesh::Mishap::FailForm(1));
    let (status, error) = bench.chat(json!({"guided_regex": "a+"})).await;
    assert_eq!(status, 400, "{error}");
    assert_eq!(error["error"]["type"], "invalid_request_error");
    assert_eq!(error["error"]["code"], "output_form");
    assert_eq!(error["error"]["param"], "guided_regex");
    assert_eq!(bench.mesh.log().chunks.len(), 4);
}

#[tokio::test]
async fn a_form_that_cannot_be_compiled_is_refused_with_its_place() {
    let bench = Bench::with(with_tools()).await;
    bench.mesh.reply("{}");
    let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": bad}});
    let body = chat(json!({"response_format": format}));
    // Engines that are not this project's judge forms by themselves.
    assert_eq!(bench.json(CHAT, &body).await.0, 200);
    let chunk_tokens = |tokens: u32| {
        chat(json!({"response_format": {"type": "json_object"}, "chunk_tokens": tokens}))
    };
    // They begin a form anew with each chunk.
    let (status, error) = bench.json(CHAT, &chunk_tokens(8)).await;
    assert_eq!(
        (status, &error["error"]["param"]),
        (400, &json!("chunk_tokens")),
        "{error}"
    );
    assert_eq!(bench.json(CHAT, &chunk_tokens(0)).await.0, 200);
    compile_forms(&bench).await;
    assert_eq!(bench.json(CHAT, &chunk_tokens(8)).await.0, 200);
    let chunks = bench.mesh.log().chunks.len();
    let function = json!({"name": "f", "parameters": bad, "strict": true});
    let tools = json!([{"type": "function", "function": function}]);
    let mut message =
        chat(json!({"output_config": {"format": {"type": "json_schema", "schema": bad}}}));
    message["max_tokens"] = json!(20);
    for (path, body, place) in [
        (
            CHAT,
            body,
            "response_format.json_schema.schema.properties.a.not",
        ),
        (
            CHAT,
            chat(json!({"tools": tools, "tool_choice": "required"})),
            "tools[0].function.parameters.properties.a.not",
        ),
        (CHAT, chat(json!({"guided_regex": "(a"})), "guided_regex"),
        (
            "/v1/responses",
            json!({"model": "tiny", "input": "a", "text": {"format": {"type": "json_schema",
                "name": "n", "schema": bad}}}),
            "text.format.schema.properties.a.not",
        ),
    ] {
        for _ in 0..2 {
            let (status, error) = bench.json(path, &body).await;
            assert_eq!(
                (status, &error["error"]["param"]),
                (400, &json!(place)),
                "{error}"
            );
        }
    }
    let (status, error) = bench.json("/v1/messages", &message).await;
    let said = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 400);
    assert!(
        said.starts_with("output_config.format.schema.properties.a.not"),
        "{said}"
    );
    let (status, _) = bench.chat(json!({"guided_regex": "a+"})).await;
    assert_eq!(status, 200);
    // No worker was asked for the others.
    assert_eq!(bench.mesh.log().chunks.len(), chunks + 1);
}

/// The parts of a choice that a client reads, whole or out of the pieces of a stream: content, name, arguments and
/// finish.
fn seen<'a>(choices: impl Iterator<Item = &'a Value>) -> [String; 4] {
    let mut seen = <[String; 4]>::default();
    for choice in choices {
        let message = choice.get("message").unwrap_or(&choice["delta"]);
        let function = &message["tool_calls"][0]["function"];
        let fields = [
            &message["content"],
            &function["name"],
            &function["arguments"],
            &choice["finish_reason"],
        ];
        for (all, field) in seen.iter_mut().zip(fields) {
            all.push_str(field.as_str().unwrap_or_default());
        }
    }
    seen
}

#[tokio::test]
async fn a_forced_call_that_the_limit_cuts_off_is_a_call() {
    let bench = Bench::with(with_tools()).await;
    let reply = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Os";
    bench.mesh.reply(&format!("{reply}lo\"}}}}\n</tool_call>"));
    let tools = json!([tool("look", false), tool("send", false)]);
    let tokenizer = bench.mesh.tokenizer();
    let head = &reply[..14];
    let limits = [reply, head].map(|text| tokenizer.encode(text).unwrap().len());
    let [length, head_length] = limits;
    let named = json!({"type": "function", "function": {"name": "look"}});
    let begun = "{\"city\": \"Os";
    // The limits end within the head and within the arguments.
    for (choice, limit, expected) in [
        (json!("required"), length, ["", "look", begun, "length"]),
        (named.clone(), length, ["", "look", begun, "length"]),
        (named, head_length, ["", "look", "", "length"]),
        // The name is not known yet.
        (json!("required"), head_length, [head, "", "", "length"]),
        // Without a form a call that is not whole is text.
        (json!("auto"), length, [reply, "", "", "length"]),
    ] {
        let mut body = chat(json!({"tools": tools, "tool_choice": choice, "max_tokens": limit}));
        let (status, answer) = bench.json(CHAT, &body).await;
        assert_eq!(status, 200, "{answer}");
        let whole = &answer["choices"][0];
        assert_eq!(seen([whole].into_iter()), expected, "{choice}");
        assert_eq!(
            whole["message"]["content"].is_null(),
            expected[0].is_empty()
        );
        body["stream"] = json!(true);
        let (events, done) = bench.stream(CHAT, &body).await;
        let streamed = seen(events.iter().map(|event| &event["choices"][0]));
        match choice == "auto" {
            // The head of a call that may still fail is held back, and its arguments flow.
            true => assert_eq!(streamed[3], "length"),
            false => assert_eq!(streamed, expected, "{choice}"),
        }
        assert!(done);
    }
    // The other APIs say the same in their words.
    let message = chat(json!({
        "tools": [{"name": "look", "input_schema": schema()}],
        "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": length,
    }));
    let (_, answer) = bench.json("/v1/messages", &message).await;
    assert_eq!(answer["stop_reason"], "max_tokens", "{answer}");
    assert_eq!(answer["content"][0]["name"], "look", "{answer}");
    let body = json!({"model": "tiny", "input": "a", "tool_choice": "required", "max_output_tokens": length,
        "tools": [{"type": "function", "name": "look", "parameters": schema()}]});
    let (_, answer) = bench.json("/v1/responses", &body).await;
    assert_eq!(answer["status"], "incomplete", "{answer}");
    let call = &answer["output"][0];
    assert_eq!(
        (&call["name"], &call["arguments"]),
        (&json!("look"), &json!(begun)),
        "{answer}"
    );
}

#[tokio::test]
async fn an_output_may_end_within_the_reasoning_before_its_form() {
    let mut config = with_tools();
    config.models[0].reasoning_parser = Some("qwen3".into());
    let bench = Bench::with(config).await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema()}});
    let reply = "<think>so it is <stop> and on";
    bench.mesh.reply(reply);
    // The limit, a stop text, and the model itself end the output there. None of them makes an answer.
    for (fields, reasoning, finish) in [
        (json!({"max_tokens": 12}), "so it", "length"),
        (json!({"stop": "<stop>"}), "so it is ", "stop"),
        (json!({}), "so it is <stop> and on", "stop"),
    ] {
        let mut body = chat(json!({"response_format": format}));
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let (status, answer) = bench.json(CHAT, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(
            (status, &choice["finish_reason"]),
            (200, &json!(finish)),
            "{answer}"
        );
        assert_eq!(
            choice["message"]["reasoning_content"], reasoning,
            "{answer}"
        );
        assert_eq!(choice["message"]["content"], Value::Null, "{answer}");
        body["stream"] = json!(true);
        let (events, done) = bench.stream(CHAT, &body).await;
        let deltas = || events.iter().map(|event| &event["choices"][0]["delta"]);
        let streamed: String = deltas()
            .filter_map(|delta| delta["reasoning_content"].as_str())
            .collect();
        assert_eq!((streamed.as_str(), done), (reasoning, true));
        assert!(deltas().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()));
    }
}

#[tokio::test]
async fn limits_of_forms_are_counted() {
    let mut config = with_tools();
    config.form_bytes_max = 40;
    let bench = Bench::with(config).await;
    bench.mesh.reply("aa");
    compile_forms(&bench).await;
    let (status, error) = bench.chat(json!({"guided_regex": "a".repeat(41)})).await;
    assert_eq!(
        (status, &error["error"]["param"]),
        (400, &json!("guided_regex")),
        "{error}"
    );
    assert_eq!(bench.chat(json!({"guided_regex": "a+"})).await.0, 200);
    assert_eq!(bench.chat(json!({"guided_regex": "(a"})).await.0, 400);
    for (line, value) in [
        (
            "refrain_gateway_rejections_total{limit=\"form_bytes\"}",
            1.0,
        ),
        ("refrain_gateway_forms_compiling", 0.0),
        ("refrain_gateway_forms_waiting", 0.0),
        ("refrain_gateway_form_verdicts{model=\"tiny\"}", 2.0),
    ] {
        assert_eq!(bench.metric(line), value, "{line}");
    }
}
