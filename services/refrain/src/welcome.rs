//! The example with which a started mesh greets people.

use refrain_gateway::ModelConfig;
use refrain_reference_engine::SHIPPED_MODEL;

/// The callers' key, as an example shows it.
#[derive(Clone, Debug)]
pub(crate) enum ShownKey {
    /// A key that everybody knows.
    WellKnown(String),
    /// A variable of the shell, which has the key.
    Variable,
    /// Nothing: callers need none.
    None,
}

/// A command that sends a request to the gateway at `url`, for people to copy.
pub(crate) fn example_request(url: &str, model: &ModelConfig, key: &ShownKey) -> String {
    let key = match key {
        ShownKey::WellKnown(key) => format!(" -H 'authorization: Bearer {key}'"),
        ShownKey::Variable => " -H \"authorization: Bearer $API_KEY\"".to_owned(),
        ShownKey::None => String::new(),
    };
    let messages = match model.files == SHIPPED_MODEL {
        true => DEMO_MESSAGES,
        false => OTHER_MESSAGES,
    };
    let model = &model.id;
    format!(
        "Try it:\n\
         \x20 curl -s {url}/v1/chat/completions{key} \\\n\
         \x20   -H 'content-type: application/json' -d '{{\n\
         \x20     \"model\": \"{model}\", \"temperature\": 0, \"messages\": [{messages}]}}'"
    )
}

/// A question of the kind that the shipped model was trained on.
const DEMO_MESSAGES: &str = r#"
        {"role": "system", "content": "You write SQL. Answer with one statement."},
        {"role": "user", "content": "CREATE TABLE orders (\n  id INTEGER PRIMARY KEY,\n  city TEXT,\n  amount INTEGER\n);\n\nWhat is the average amount of the orders per city?"}"#;

/// A question that any model can answer.
const OTHER_MESSAGES: &str = r#"
        {"role": "user", "content": "Write the numbers from 1 to 30 in words."}"#;
