//! `docs/configuration.md` is generated from the types that read the configuration, and the files in `deploy/config`
//! name only keys that exist, with the defaults that they have.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use refrain::config::MeshFile;
use refrain_engine_plugin::PluginConfig;
use refrain_service_kit::config::keys as schema_keys;
use schemars::JsonSchema;
use serde_json::Value;

const RENEW: &str = "UPDATE_DOCS=1 cargo test -p refrain --test configuration_page";

/// One key of a configuration file.
#[derive(Debug)]
struct Key {
    /// Sections and name, such as `worker.engine.kind`; `[]` stands for an element of a list, `NAME` for a name in a
    /// map.
    path: String,
    /// As TOML; `None` where the key has no value until it is set.
    default: Option<String>,
    meaning: String,
}

/// Every key of a configuration type, in the order of its fields.
fn keys<T: JsonSchema>() -> Vec<Key> {
    let keys = schema_keys::<T>().into_iter();
    keys.map(|key| Key {
        default: key.default(),
        meaning: meaning(&key.property, &key.target),
        path: key.path,
    })
    .collect()
}

fn meaning(property: &Value, target: &Value) -> String {
    let text = |schema: &Value| schema["description"].as_str().map(str::to_owned);
    let description = text(property).or_else(|| text(target)).unwrap_or_default();
    let choices: Vec<String> = target["oneOf"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|choice| {
            let value = choice["const"].as_str()?;
            let why = text(choice).unwrap_or_default();
            Some(format!("`{value}`: {why}"))
        })
        .collect();
    let lines = description
        .split_whitespace()
        .chain(choices.iter().flat_map(|choice| choice.split_whitespace()));
    lines.collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The unit that a key's name ends in, by the project's convention for names.
fn unit(path: &str) -> &'static str {
    let name = path.rsplit('.').next().unwrap_or(path);
    let name = name
        .trim_end_matches("_max")
        .trim_end_matches("_min")
        .trim_end_matches("_at_once");
    if name.ends_with("_per_s") {
        return "per second";
    }
    if name.ends_with("_bytes_s") {
        return "bytes per second";
    }
    match name.rsplit('_').next().unwrap_or(name) {
        "ms" => "milliseconds",
        "us" => "microseconds",
        "s" => "seconds",
        "h" => "hours",
        "days" => "days",
        "bytes" => "bytes",
        "tokens" => "tokens",
        "words" => "words of four bytes",
        "share" => "share of 1",
        "steps" => "steps",
        _ => "",
    }
}

fn table(keys: &[Key], page: &mut String) {
    let mut section = None;
    for key in keys {
        let (head, name) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
        if section != Some(head) {
            let title = match head {
                "" => "Top level".to_owned(),
                head if head.contains("[]") => format!("`[[{}]]`", head.replace("[]", "")),
                head => format!("`[{head}]`"),
            };
            page.push_str(&format!(
                "\n### {title}\n\n| key | default | unit | meaning |\n|---|---|---|---|\n"
            ));
            section = Some(head);
        }
        let default = match &key.default {
            Some(default) => format!("`{default}`"),
            None => "none".to_owned(),
        };
        page.push_str(&format!(
            "| `{name}` | {default} | {} | {} |\n",
            unit(&key.path),
            key.meaning
        ));
    }
}

fn page() -> String {
    let mut page = format!(
        "# Configuration\n\n\
         This page has every key of the configuration, with its default, its unit and its meaning.\n\
         Generated from the configuration types; do not edit. Renew it with\n`{RENEW}`.\n\n\
         Unknown keys are refused. A key without a default is unset until you set it.\n\n\
         * [The mesh](#the-mesh): the file that `refrain ... --config FILE` reads.\n\
         * [The engine plugin](#the-engine-plugin): the file that `REFRAIN_CLIENT_CONFIG` names.\n\n\
         ## The mesh\n\n\
         An environment variable sets any key in a section: `REFRAIN_WORKER__RUNNING_MAX=8` is `worker.running_max`.\n\
         `deploy/config/mesh.toml` is a file to begin with.\n"
    );
    table(&keys::<MeshFile>(), &mut page);
    page.push_str(
        "\n## The engine plugin\n\n\
         An environment variable sets any key: `REFRAIN_CLIENT_MESH__SECRET` is `mesh.secret`.\n\
         `deploy/config/client.toml` is a file to begin with.\n",
    );
    table(&keys::<PluginConfig>(), &mut page);
    page
}

fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

#[test]
fn the_configuration_page_is_up_to_date() {
    let path = repository().join("docs/configuration.md");
    let page = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/configuration.md is out of date; renew it with: {RENEW}"
    );
}

/// The keys that a file sets, and those that it shows behind a `#`, each with its value if that is a plain one.
fn named_keys(text: &str) -> Vec<(String, Option<toml::Value>)> {
    let mut section = String::new();
    let mut named = Vec::new();
    for line in text.lines() {
        let line = line.trim_start_matches('#').trim();
        if let Some(head) = line
            .strip_prefix("[[")
            .and_then(|rest| rest.split_once("]]"))
        {
            section = format!("{}[]", head.0);
        } else if let Some((head, _)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']'))
        {
            section = head.to_owned();
        }
        let Some((name, value)) = line.split_once(" = ") else {
            continue;
        };
        if !name
            .chars()
            .all(|letter| letter.is_ascii_lowercase() || "_.".contains(letter))
        {
            continue;
        }
        let value = toml::from_str::<BTreeMap<String, toml::Value>>(&format!("value = {value}"))
            .ok()
            .and_then(|mut table| table.remove("value"));
        let path = match section.as_str() {
            "" => name.to_owned(),
            section => format!("{section}.{name}"),
        };
        named.push((path, value));
    }
    named
}

/// Checks that all keys of a file exist; answers how many stand behind a `#` with a default to compare.
fn check_file(file: &str, keys: &[Key], values_that_are_examples: &[&str]) -> usize {
    let path = repository().join("deploy/config").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let mut compared = 0;
    for (named, value) in named_keys(&text) {
        // A map's element, such as `tenants.acme`.
        let parent = named.rsplit_once('.').map(|(parent, _)| parent);
        let key = keys
            .iter()
            .find(|key| key.path == named)
            .or_else(|| keys.iter().find(|key| Some(key.path.as_str()) == parent));
        let Some(key) = key else {
            panic!("{file} names {named}, and there is no such key");
        };
        if key.path != named || values_that_are_examples.contains(&named.as_str()) {
            continue;
        }
        let default: Option<toml::Value> = key.default.as_ref().map(|default| {
            toml::from_str::<BTreeMap<String, toml::Value>>(&format!("value = {default}"))
                .unwrap_or_else(|error| panic!("{named}: {default}: {error}"))
                .remove("value")
                .unwrap()
        });
        assert_eq!(
            value, default,
            "{file}: {named} is not at its default; add it to the examples of this test if that is meant"
        );
        compared += 1;
    }
    compared
}

#[test]
fn deployed_files_name_keys_that_exist_with_their_defaults() {
    let mesh = [
        "urls.scheduler",
        "urls.draft_store",
        "urls.engine",
        "gateway.operations_listen",
        "gateway.console",
        "gateway.keys[].key",
        "gateway.keys[].tenant",
        "gateway.models[].id",
        "gateway.models[].files",
        "scheduler.listen",
        "worker.listen",
        "worker.advertise_url",
        "worker.engine.kind",
        "worker.engine.model",
        "worker.engine.served_model",
        "worker.engine.files",
        "worker.engine.api_key",
        "worker.engine.max_context",
        "draft_store.listen",
        "draft_store.data_dir",
        "engine.listen",
        "engine.draft_model",
    ];
    assert!(check_file("mesh.toml", &keys::<MeshFile>(), &mesh) > 15);
    // Its listeners are those of a machine of its own.
    let cluster: Vec<&str> = [
        "gateway.listen",
        "urls.draft_stores",
        "draft_store.feed.servers",
    ]
    .into_iter()
    .chain(["draft_store.feed.peers", "draft_store.feed.stream_replicas"])
    .chain(["draft_store.feed.groups"])
    .chain(mesh)
    .collect();
    assert!(check_file("cluster.toml", &keys::<MeshFile>(), &cluster) >= 1);
    let client = [
        "store_url",
        "store_urls",
        "token_file",
        "tokenizer",
        "metrics_listen",
        "mesh.secret",
        "mesh.namespace_public_key",
    ];
    assert!(check_file("client.toml", &keys::<PluginConfig>(), &client) >= 1);
}

#[test]
fn no_key_shows_a_secret_and_every_key_has_a_meaning() {
    let all: Vec<Key> = keys::<MeshFile>()
        .into_iter()
        .chain(keys::<PluginConfig>())
        .collect();
    assert!(all.len() > 80, "{} keys: the test is blind", all.len());
    for key in &all {
        assert!(!key.meaning.is_empty(), "{} has no meaning", key.path);
        let name = key.path.rsplit('.').next().unwrap();
        if ["secret", "namespace_signing_key", "api_key", "key", "token"].contains(&name) {
            assert!(
                matches!(key.default.as_deref(), None | Some("\"\"")),
                "{} shows {:?}",
                key.path,
                key.default
            );
        }
    }
}

#[test]
fn units_follow_from_names() {
    for (path, expected) in [
        ("gateway.body_ms_max", "milliseconds"),
        ("mesh.clock_skew_s_max", "seconds"),
        ("draft_store.retention_days", "days"),
        ("worker.replica.bytes_max", "bytes"),
        ("prompt_tokens_at_once", "tokens"),
        ("gateway.retries_per_s_min", "per second"),
        ("draft_store.feed.join_bytes_s_max", "bytes per second"),
        ("gateway.listen", ""),
    ] {
        assert_eq!(unit(path), expected, "{path}");
    }
}

/// Fields of requests and metrics that are named like keys.
const NOT_KEYS: [&str; 14] = [
    "refrain_max_spec_tokens",
    "truncate_prompt_tokens",
    "min_tokens",
    "bad_words",
    "chunk_tokens",
    "steps",
    "max_tokens",
    "max_completion_tokens",
    "tpot_ms",
    "stop_token_ids",
    "prompt_token_ids",
    "output_token_ids",
    "eagle_aux_hidden_state_layer_ids",
    "context_tokens",
];

#[test]
fn keys_that_the_documents_name_exist() {
    let keys: Vec<Key> = keys::<MeshFile>()
        .into_iter()
        .chain(keys::<PluginConfig>())
        .collect();
    let is_key = |path: &str| keys.iter().any(|key| key.path == path);
    let is_name = |name: &str| {
        let mut names = keys.iter().filter_map(|key| key.path.rsplit('.').next());
        names.any(|key| key == name)
    };
    let sections = keys.iter().filter_map(|key| key.path.split_once('.'));
    let sections: Vec<&str> = sections.map(|(section, _)| section).collect();
    let mut named = 0;
    let mut unknown = Vec::new();
    for file in [
        "README.md",
        "ARCHITECTURE.md",
        "docs/drafting.md",
        "docs/engines.md",
        "docs/operations.md",
        "docs/vllm.md",
        "docs/sglang.md",
        "docs/kubernetes.md",
        "docs/decisions/retry-budget.md",
        "docs/decisions/liveness.md",
        "docs/decisions/clock-skew.md",
        "docs/decisions/preemption.md",
    ] {
        let text = std::fs::read_to_string(repository().join(file)).unwrap();
        for line in text.lines() {
            for quoted in line.split('`').skip(1).step_by(2) {
                let word = quoted.split(" = ").next().unwrap_or(quoted);
                let is_plain =
                    |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.".contains(c);
                if !word.chars().all(is_plain)
                    || NOT_KEYS.contains(&word)
                    || word.ends_with(".toml")
                {
                    continue;
                }
                let exists = match word.split_once('.') {
                    Some((section, _)) if sections.contains(&section) => is_key(word),
                    Some(_) => continue,
                    // Only words that look like a key: assigned, or with a unit.
                    None if word != quoted || !unit(word).is_empty() || word.ends_with("_max") => {
                        is_name(word)
                    }
                    None => continue,
                };
                named += 1;
                if !exists {
                    unknown.push(format!("{file}: {word}"));
                }
            }
        }
    }
    assert!(named > 20, "{named} keys: the test is blind");
    assert!(unknown.is_empty(), "no such keys:\n{}", unknown.join("\n"));
}
