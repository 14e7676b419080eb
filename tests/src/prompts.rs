//! Prompts for the tests. No test depends on a certain answer, only on a variety of answers.

use serde_json::Value;

/// The public name of the shipped model.
pub const TINY_MODEL: &str = "refrain-tiny";

const TABLES: &[(&str, &str, &str)] = &[
    ("orders", "city", "price"),
    ("customers", "country", "age"),
    ("invoices", "status", "amount"),
    ("machines", "color", "weight"),
    ("students", "name", "score"),
    ("parcels", "category", "quantity"),
];

/// Prompts of different kinds: questions about schemas, notes, code, repetitive lists, text that is not English, and
/// single letters.
pub fn varied_prompts(count: usize) -> Vec<String> {
    (0..count)
        .map(|number| {
            let (table, text, value) = TABLES[number % TABLES.len()];
            let schema =
                format!("CREATE TABLE {table} (\n  id INTEGER PRIMARY KEY,\n  {text} TEXT,\n  {value} INTEGER\n);");
            match number / TABLES.len() % 9 {
                0 => format!("{schema}\n\nList the {text} and {value} of all {table} ordered by {value}."),
                1 => format!("{schema}\n\nShow all {table} where {value} is more than {}.", 10 * number),
                2 => format!("Write a short note about {number} {table}."),
                3 => format!("fn {text}_of_{table}({value}: u32) -> u32 {{\n    // {number}\n"),
                4 => format!("{text}, {value}, {text}, {value}, {text}, {value}, {number}: say it again."),
                5 => format!("{{\"{table}\": [{{\"{text}\": \"a\", \"{value}\": {number}}}]}}"),
                6 => format!("Größe, naïve, 東京, Ω≈{number}, 🚲 {table}"),
                7 => char::from(b'a' + (number % 26) as u8).to_string(),
                _ => format!("{number} {number} {number}\n").repeat(4 + number % 5),
            }
        })
        .collect()
}

/// A task whose answer, with [`crate::Chat::endless`], takes a while.
pub fn long_task(number: usize) -> String {
    format!(
        "List {number} towns, then list them again in another order, then say which is the largest."
    )
}

/// The ids of the tokenizer's special tokens, including its end tokens.
///
/// # Panics
/// The shipped model's tokenizer cannot be read.
pub fn special_tokens() -> Vec<u64> {
    let path = crate::repository().join("services/reference-engine/model/tokenizer.json");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let tokenizer: Value = serde_json::from_str(&text).unwrap_or_default();
    let added = tokenizer["added_tokens"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    added
        .iter()
        .filter_map(|token| token["id"].as_u64())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn prompts_differ() {
        let prompts = varied_prompts(54);
        assert_eq!(prompts.iter().collect::<BTreeSet<_>>().len(), 54);
        assert!(!special_tokens().is_empty());
    }
}
