//! A generated workload: requests of several tenants' agents, in the forms that the shipped model was trained on.
//!
//! *Repetitive*: agents work on a list of tasks over a fixed schema and fixed tools. They ask the same few things
//! again, sometimes with another value, at temperature 0. *Unique*: prompts share nothing but their form, at
//! temperature 1. *Schema*: notes of which no two are alike become JSON that a schema binds, at temperatures 0 and 1.
//! The seed determines everything.

use serde_json::{Value, json};

/// One request of the workload.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WorkloadCall {
    /// The tenant that sends it, counted from 0.
    pub(super) tenant: usize,
    /// The agent's session.
    pub(super) session: String,
    /// Chat messages.
    pub(super) messages: Vec<Value>,
    /// Sampling temperature.
    pub(super) temperature: f64,
    /// Sampling seed.
    pub(super) seed: u64,
    /// Output limit.
    pub(super) max_tokens: u32,
    /// JSON schema of the answer, if it must have one.
    pub(super) schema: Option<Value>,
}

/// The parts of the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WorkloadPart {
    /// Agents that repeat themselves.
    Repetitive,
    /// Requests that have nothing in common but their form.
    Unique,
    /// Requests whose answers a JSON schema binds.
    Schema,
}

impl WorkloadPart {
    /// Name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            WorkloadPart::Repetitive => "repetitive",
            WorkloadPart::Unique => "unique",
            WorkloadPart::Schema => "schema",
        }
    }
}

/// The calls of one round. Rounds of the same seed share schemas and tools, but not tasks.
pub(super) fn calls(
    part: WorkloadPart,
    seed: u64,
    round: u64,
    calls: usize,
    tenants: usize,
) -> Vec<WorkloadCall> {
    let mut random = SplitMix(seed ^ (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ part as u64);
    (0..calls)
        .map(|number| {
            let tenant = number % tenants.max(1);
            let call = number / tenants.max(1);
            match part {
                WorkloadPart::Repetitive => repetitive(&mut random, seed, tenant, call),
                WorkloadPart::Unique => unique(&mut random, tenant, number),
                WorkloadPart::Schema => schema_bound(&mut random, tenant, number),
            }
        })
        .collect()
}

const SQL_SYSTEM: &str = "You write SQL. Answer with one statement.";

const ENTITIES: &[(&str, &str)] = &[
    ("order", "orders"),
    ("customer", "customers"),
    ("invoice", "invoices"),
    ("ticket", "tickets"),
    ("machine", "machines"),
    ("book", "books"),
    ("driver", "drivers"),
    ("parcel", "parcels"),
    ("student", "students"),
    ("recipe", "recipes"),
];
const TEXTS: &[&str] = &[
    "name", "city", "status", "country", "title", "color", "category",
];
const NUMBERS: &[&str] = &["price", "amount", "age", "weight", "score", "quantity"];
const VALUES: &[&str] = &[
    "open", "closed", "Berlin", "Paris", "red", "blue", "new", "paid",
];
const NAMES: &[&str] = &[
    "Anna", "Ben", "Carla", "David", "Elena", "Felix", "Greta", "Hugo",
];
const PLACES: &[&str] = &[
    "Paris", "Berlin", "Oslo", "Rome", "Madrid", "Vienna", "Lima", "Cairo",
];

fn schema((_, many): (&str, &str), text: &str, number: &str) -> String {
    format!(
        "CREATE TABLE {many} (\n  id INTEGER PRIMARY KEY,\n  {text} TEXT,\n  {number} INTEGER\n);"
    )
}

fn message(role: &str, content: impl Into<String>) -> Value {
    json!({ "role": role, "content": content.into() })
}

const TOOL_SYSTEM: &str = r#"You can call these tools:
{"name": "get_weather", "parameters": {"city": "string", "days": "integer"}}
{"name": "create_order", "parameters": {"item": "string", "count": "integer", "customer": "string"}}
To call a tool, answer with one JSON object: {"name": ..., "arguments": {...}}"#;

fn sql_messages(schema: &str, task: &str) -> Vec<Value> {
    vec![
        message("system", SQL_SYSTEM),
        message("user", format!("{schema}\n\n{task}")),
    ]
}

fn repetitive(random: &mut SplitMix, seed: u64, tenant: usize, call: usize) -> WorkloadCall {
    // A tenant has one schema and five tasks. Each call is one of them, sometimes with another value.
    let mut fixed = SplitMix(seed.wrapping_add(tenant as u64 * 7919));
    let entity = *fixed.pick(ENTITIES);
    let text = *fixed.pick(TEXTS);
    let number = *fixed.pick(NUMBERS);
    let schema = schema(entity, text, number);
    let sql = |task: String| sql_messages(&schema, &task);
    let many = entity.1;
    let messages = match random.below(5) {
        0 => sql(format!("Count the {many} for each {text}.")),
        1 => sql(format!(
            "What is the average {number} of the {many} per {text}?"
        )),
        2 => sql(format!(
            "Show the 5 {many} with the highest {number}. Show {text} and {number}."
        )),
        3 => {
            let value = random.pick_often_of_first_two(VALUES);
            sql(format!(
                "Show the {text} and {number} of all {many} where {text} is '{value}'."
            ))
        }
        _ => {
            let place = random.pick_often_of_first_two(PLACES);
            let ask = format!("What is the weather in {place} for 3 days?");
            vec![message("system", TOOL_SYSTEM), message("user", ask)]
        }
    };
    WorkloadCall {
        tenant,
        session: format!("agent-{tenant}-{}", call / 8),
        messages,
        temperature: 0.0,
        seed: random.next(),
        max_tokens: 96,
        schema: None,
    }
}

fn unique(random: &mut SplitMix, tenant: usize, number: usize) -> WorkloadCall {
    let messages = match random.below(3) {
        0 => {
            let entity = *random.pick(ENTITIES);
            let text = *random.pick(TEXTS);
            let column = *random.pick(NUMBERS);
            let (many, limit) = (entity.1, random.below(9000));
            let task =
                format!("Show the {text} of all {many} where {column} is more than {limit}.");
            sql_messages(&schema(entity, text, column), &task)
        }
        1 => {
            let (a, b) = (100 + random.below(9900), 100 + random.below(9900));
            vec![message("user", format!("What is {a} + {b}?"))]
        }
        _ => {
            let (who, place) = (random.pick(NAMES), random.pick(PLACES));
            let (day, count) = (1 + random.below(28), 2 + random.below(38));
            let cost = 10 + random.below(900);
            let note = format!(
                "{who} went to {place} on 2024-05-{day:02}. There {who} bought {count} lamps for {cost} in total."
            );
            let ask = format!("{note}\n\nList the facts of the note.");
            vec![message("user", ask)]
        }
    };
    WorkloadCall {
        tenant,
        session: format!("unique-{tenant}-{number}"),
        messages,
        temperature: 1.0,
        seed: random.next(),
        max_tokens: 96,
        schema: None,
    }
}

/// The content of a note, as a schema of several fields: names that repeat, choices, numbers and a list.
fn note_schema() -> Value {
    let item = json!({
        "type": "object",
        "properties": {
            "name": {"enum": ["lamp", "chair", "table", "carpet"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 99}
        },
        "required": ["name", "count"],
        "additionalProperties": false
    });
    json!({
        "type": "object",
        "properties": {
            "customer": {"type": "string", "maxLength": 12},
            "city": {"enum": PLACES},
            "date": {"type": "string", "pattern": "^2024-0[1-9]-[0-2][0-9]$"},
            "items": {"type": "array", "items": item, "minItems": 1, "maxItems": 3},
            "total_price": {"type": "integer", "minimum": 0, "maximum": 9999},
            "payment": {"enum": ["card", "cash", "invoice", null]},
            "is_delivered": {"type": "boolean"}
        },
        "required": ["customer", "city", "date", "items", "total_price", "payment", "is_delivered"],
        "additionalProperties": false
    })
}

fn schema_bound(random: &mut SplitMix, tenant: usize, number: usize) -> WorkloadCall {
    let (who, place) = (random.pick(NAMES), random.pick(PLACES));
    let (day, count) = (1 + random.below(28), 2 + random.below(38));
    let cost = 10 + random.below(900);
    let note = format!(
        "{who} went to {place} on 2024-05-{day:02}. There {who} bought {count} lamps for {cost} in total."
    );
    WorkloadCall {
        tenant,
        session: format!("schema-{tenant}-{number}"),
        messages: vec![message(
            "user",
            format!("{note}\n\nList the facts of the note."),
        )],
        temperature: (number % 2) as f64,
        seed: random.next(),
        max_tokens: 160,
        schema: Some(note_schema()),
    }
}

/// splitmix64. The workload must be the same everywhere, whatever a crate of random numbers changes.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // OpenAI's seeds are signed, and many clients read JSON numbers as doubles.
        (mixed ^ (mixed >> 31)) >> 12
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of the first two in three of four cases, else any.
    fn pick_often_of_first_two<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        match self.below(4) {
            0 => self.pick(from),
            _ => self.pick(&from[..2]),
        }
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_determines_the_workload() {
        assert_eq!(
            calls(WorkloadPart::Unique, 1, 0, 9, 2),
            calls(WorkloadPart::Unique, 1, 0, 9, 2)
        );
        assert_ne!(
            calls(WorkloadPart::Unique, 1, 0, 9, 2),
            calls(WorkloadPart::Unique, 1, 1, 9, 2)
        );
    }

    #[test]
    fn repetitive_calls_repeat_and_unique_ones_do_not() {
        let distinct = |part| {
            let mut prompts: Vec<String> = calls(part, 3, 0, 60, 2)
                .iter()
                .map(|call| serde_json::to_string(&call.messages).unwrap())
                .collect();
            prompts.sort();
            prompts.dedup();
            prompts.len()
        };
        assert!(distinct(WorkloadPart::Repetitive) < 30);
        assert!(distinct(WorkloadPart::Unique) > 50);
        assert!(distinct(WorkloadPart::Schema) > 50);
    }
}
