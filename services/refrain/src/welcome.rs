//! The example with which a started mesh greets people.

use std::net::SocketAddr;

/// A command that sends a request, for people to copy.
pub(crate) fn example_request(addr: SocketAddr, model: &str, key: &str) -> String {
    format!(
        "Try it:\n\
         \x20 curl -s http://{addr}/v1/chat/completions -H 'authorization: Bearer {key}' \\\n\
         \x20   -H 'content-type: application/json' -d '{{\n\
         \x20     \"model\": \"{model}\", \"temperature\": 0, \"messages\": [{DEMO_MESSAGES}]}}'"
    )
}

/// A question of the kind that the shipped model was trained on.
const DEMO_MESSAGES: &str = r#"
        {"role": "system", "content": "You write SQL. Answer with one statement."},
        {"role": "user", "content": "CREATE TABLE orders (\n  id INTEGER PRIMARY KEY,\n  city TEXT,\n  amount INTEGER\n);\n\nWhat is the average amount of the orders per city?"}"#;
