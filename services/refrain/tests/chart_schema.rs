//! The Helm chart checks its values by `values.schema.json`. The keys of the value `config` are generated there from
//! the types that read the configuration, so that `helm lint` finds a wrong key. The rest of the file is written by
//! hand.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::PathBuf;

use refrain::config::MeshFile;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

const RENEW: &str = "UPDATE_DOCS=1 cargo test -p refrain --test chart_schema";

/// Keys that hold secrets. The chart renders `config` into a ConfigMap, which is no place for them. It takes them
/// from Secrets, by files and by variables.
const SECRETS: [&str; 9] = [
    "mesh.secret",
    "mesh.secrets_accepted",
    "mesh.namespace_signing_key",
    "gateway.keys.key",
    "gateway.limits_redis.password",
    "worker.engine.api_key",
    "engines.api_key",
    // The URLs of brokers may hold a password.
    "draft_store.feed.servers",
    "scheduler.standby.servers",
];

/// Keys that the chart sets itself, so that a value for them would be overwritten without a word.
const SET_BY_THE_CHART: [&str; 37] = [
    "mesh.secret_file",
    "mesh.issuer_public_keys",
    "mesh.credential_file",
    "mesh.ca",
    "mesh.certificate",
    "mesh.key",
    "mesh.address_name",
    "mesh.namespace_public_key",
    "mesh.namespace_signing_key_file",
    "urls.scheduler",
    "urls.schedulers",
    "urls.draft_store",
    "urls.draft_stores",
    "urls.engine",
    "gateway.listen",
    "gateway.operations_listen",
    "gateway.tenants_file",
    "gateway.tenants_cache_file",
    "gateway.usage_dir",
    "gateway.trainer.listen",
    "gateway.trainer.allows_other_machines",
    "scheduler.listen",
    "scheduler.standby.id",
    "scheduler.standby.bucket",
    "scheduler.standby.kubernetes_lease",
    "worker.listen",
    "worker.id",
    "worker.advertise_url",
    "worker.adoption.first_port",
    "draft_store.listen",
    "draft_store.data_dir",
    "draft_store.feed.advertise_url",
    "draft_store.feed.peers",
    "draft_store.feed.shards",
    "draft_store.feed.shard",
    "engine.kv_pool.peers",
    "engine.listen",
];

/// Keys that only `refrain up` reads, which no chart starts.
const ONLY_OF_UP: [&str; 1] = ["engines"];

/// The definitions of all sections of the configuration, without keys of secrets and without those of the chart.
fn definitions() -> Map<String, Value> {
    let mut generator = SchemaGenerator::new(SchemaSettings::draft2020_12());
    let root = generator.subschema_for::<MeshFile>();
    assert_eq!(root.as_value()["$ref"], "#/$defs/MeshFile");
    let mut definitions = generator.definitions().clone();
    let left_out = SECRETS
        .into_iter()
        .chain(SET_BY_THE_CHART)
        .chain(ONLY_OF_UP);
    for path in left_out {
        let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
        let section = section.split('.').filter(|key| !key.is_empty()).fold(
            "MeshFile".to_owned(),
            |owner, key| {
                definition_of(&definitions[&owner]["properties"][key])
                    .unwrap_or_else(|| panic!("{path}: {key} is no section"))
            },
        );
        let keys = definitions[&section]["properties"].as_object_mut().unwrap();
        assert!(keys.shift_remove(key).is_some(), "there is no key {path}");
    }
    // The loader of the configuration refuses keys that no type has, so no type says it by itself.
    for (_, section) in &mut definitions {
        let section = section.as_object_mut().unwrap();
        if section.contains_key("properties") {
            section.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
    }
    definitions
}

/// The definition of a section, of an optional section, or of the elements of a list of sections.
fn definition_of(property: &Value) -> Option<String> {
    let options = property["anyOf"].as_array().into_iter().flatten();
    let reference = [property, &property["items"]]
        .into_iter()
        .chain(options)
        .find_map(|schema| schema["$ref"].as_str());
    Some(reference?.rsplit('/').next()?.to_owned())
}

/// Whether a definition is generated. Names of those that are written by hand begin with a small letter.
fn is_generated(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
}

#[test]
fn the_schema_of_the_charts_values_has_the_keys_of_the_configuration() {
    let path = PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/helm/refrain/values.schema.json"
    ));
    let stored = std::fs::read_to_string(&path).unwrap();
    let mut schema: Value = serde_json::from_str(&stored).unwrap();
    let kept = schema["$defs"].as_object().unwrap().clone();
    let by_hand = kept.into_iter().filter(|(name, _)| !is_generated(name));
    let generated = definitions();
    assert!(generated.keys().all(|name| is_generated(name)));
    schema["$defs"] = Value::Object(by_hand.chain(generated).collect());
    let renewed = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &renewed).unwrap();
        return;
    }
    assert!(
        stored == renewed,
        "values.schema.json is out of date; renew it with: {RENEW}"
    );
}

/// A key that is added with a secret in it has to be taken out as well.
#[test]
fn no_key_of_the_chart_can_hold_a_secret() {
    let names = [
        "secret",
        "password",
        "token",
        "api_key",
        "key",
        "signing_key",
    ];
    for (definition, schema) in definitions() {
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            let is_secret = names.iter().any(|name| key == name)
                || key.ends_with("_secret")
                || key.ends_with("signing_key");
            // Private keys of certificates are files.
            let is_file = property["description"]
                .as_str()
                .is_some_and(|text| text.to_lowercase().contains("file"));
            assert!(!is_secret || is_file, "{definition}.{key}");
        }
    }
}

/// Each section refuses keys that it does not have.
#[test]
fn unknown_keys_are_refused_in_each_section() {
    for (name, schema) in definitions() {
        if schema["properties"].is_object() {
            assert_eq!(schema["additionalProperties"], json!(false), "{name}");
        }
    }
}
