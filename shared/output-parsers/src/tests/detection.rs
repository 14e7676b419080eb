//! Fragments by which the templates of real models are recognised.

use crate::{Detected, ReasoningParserKind, ToolParserKind, detect};

#[test]
fn templates_of_models() {
    use ReasoningParserKind as Reasoning;
    use ToolParserKind as Tools;
    for (model, template, special_tokens, tools_as, reasoning_as) in [
        (
            "Qwen 2.5",
            r#"return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"#,
            &["<|im_end|>"][..],
            Tools::Hermes,
            Reasoning::None,
        ),
        (
            "Qwen 3",
            r#"{%- if '</think>' in content %}{{- '<think>\n' }}{%- endif %}{{- '<tool_call>\n{\"name\": \"' }}"#,
            &[],
            Tools::Hermes,
            Reasoning::Qwen3,
        ),
        (
            "Qwen3 Coder",
            r"<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>",
            &[],
            Tools::Qwen3Coder,
            Reasoning::None,
        ),
        (
            "Llama 3.1",
            r#"{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}{{- "<|python_tag|>" }}"#,
            &["<|python_tag|>", "<|eom_id|>"],
            Tools::Llama3Json,
            Reasoning::None,
        ),
        (
            "Refrain's own",
            r#"{{- 'To call a tool, answer with one JSON object: {"name": ..., "arguments": {...}}' -}}"#,
            &["<|im_end|>"],
            Tools::Llama3Json,
            Reasoning::None,
        ),
        (
            "Llama 4 with Python calls",
            r"you MUST put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
            &["<|python_start|>", "<|python_end|>"],
            Tools::Pythonic,
            Reasoning::None,
        ),
        (
            "Mistral 7B v0.3",
            r#"{{- "[TOOL_CALLS] [" }}{{- ', "id": "' + tool_call.id + '"}' }}"#,
            &["[INST]", "[TOOL_CALLS]"],
            Tools::Mistral,
            Reasoning::None,
        ),
        (
            "Magistral",
            "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{{ '[THINK]' }}",
            &["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
            Tools::Mistral,
            Reasoning::Mistral,
        ),
        (
            "DeepSeek R1",
            r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\n' + '```json' + '\n'}}{% set content = content.split('</think>')[-1] %}",
            &["<｜tool▁calls▁begin｜>"],
            Tools::DeepSeekV3,
            Reasoning::DeepSeekR1,
        ),
        (
            "DeepSeek V3.1",
            r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments }}{{'<｜Assistant｜><think>'}}",
            &[],
            Tools::DeepSeekV31,
            Reasoning::Qwen3,
        ),
        (
            "Kimi K2",
            "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
            &["<|im_end|>"],
            Tools::KimiK2,
            Reasoning::None,
        ),
        (
            "GLM 4.5",
            r"<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n{{- '<think></think>' }}",
            &[],
            Tools::Glm45,
            Reasoning::Qwen3,
        ),
        (
            "gpt-oss",
            r#"{{- "<|start|>assistant<|channel|>analysis<|message|>" }}{{- "<|call|>" }}"#,
            &["<|return|>", "<|constrain|>", "<|call|>"],
            Tools::Harmony,
            Reasoning::Harmony,
        ),
        (
            "Seed OSS",
            "{{ '<seed:think>' }}{{ '<seed:tool_call>' }}",
            &["<seed:think>"],
            Tools::None,
            Reasoning::SeedOss,
        ),
        (
            "Command A Reasoning",
            "<|START_THINKING|>I will start my response.<|END_THINKING|><|START_ACTION|>",
            &[],
            Tools::None,
            Reasoning::Cohere,
        ),
        (
            "a model without either",
            "{% for message in messages %}{{ message['content'] }}{% endfor %}",
            &["</s>"],
            Tools::None,
            Reasoning::None,
        ),
    ] {
        let expected = Detected {
            tools_as,
            reasoning_as,
        };
        assert_eq!(detect(template, special_tokens), expected, "{model}");
    }
}
