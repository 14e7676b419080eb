//! Drafts from the form of an output, on the shipped model.

use anyhow::{Context, ensure};
use e2e::{Chat, UpMesh, varied_prompts};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_tokens_are_drafted_and_change_no_output() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let schema = json!({
        "type": "object",
        "properties": {
            "customer_name": {"enum": ["Anna", "Ben"]},
            "is_delivered": {"type": "boolean"},
            "total_price": {"type": "integer", "minimum": 0, "maximum": 999}
        },
        "required": ["customer_name", "is_delivered", "total_price"],
        "additionalProperties": false
    });
    let format = json!({
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": true, "schema": schema}
    });
    let (mut steps, mut plain_steps, mut forced) = (0, 0, 0);
    for (place, prompt) in varied_prompts(6).iter().enumerate() {
        let ask = |mode: &str| {
            Chat::new(prompt)
                .max_tokens(80)
                .set("temperature", place % 2)
                .set("seed", place)
                .set("response_format", format.clone())
                .set("speculation", mode)
        };
        let plain = client.chat(&ask("off")).await?;
        let drafted = client.chat(&ask("suffix")).await?;
        ensure!(
            plain.text == drafted.text,
            "{} and {}",
            plain.text,
            drafted.text
        );
        let value: Value = serde_json::from_str(&plain.text).context(plain.text.clone())?;
        ensure!(value["is_delivered"].is_boolean(), "{value}");
        let counts = |body: &Value, path: &str| {
            let count = body.pointer(&format!("/metrics/speculative_decoding/{path}"));
            count.and_then(Value::as_u64).unwrap_or(0)
        };
        plain_steps += counts(&plain.body, "steps");
        steps += counts(&drafted.body, "steps");
        forced += counts(&drafted.body, "by_source/grammar/accepted");
        ensure!(counts(&plain.body, "drafted") == 0);
    }
    ensure!(
        forced > 20 && steps * 3 < plain_steps * 2,
        "{forced} forced, {steps} of {plain_steps} steps"
    );
    mesh.stop().await;
    Ok(())
}
