//! Tests of the models on offer.

use super::template::CHAT_TEMPLATE_FAILED;
use super::*;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_tokenization::testing::{IM_END, byte_level_files};

fn models() -> (Models, MeshAuth) {
    let mesh = MeshConfig::generate().unwrap();
    let configs = [
        ModelConfig {
            id: "open".into(),
            files: "x".into(),
            ..ModelConfig::default()
        },
        ModelConfig {
            id: "closed".into(),
            files: "x".into(),
            tenants: vec!["acme".parse().unwrap()],
            ..ModelConfig::default()
        },
    ];
    let signer = NamespaceSigner::new(&mesh).unwrap();
    let models = Models::new(&configs, &|_| Ok(byte_level_files()), signer).unwrap();
    (models, MeshAuth::new(&mesh).unwrap())
}

fn served(models: &Models, workers: u32, max_context: u32) -> ServedModel {
    let tokenizer = models.models[0].tokenizer.identity().to_owned();
    ServedModel {
        model: "open".into(),
        tokenizer,
        max_context,
        workers,
        open: None,
        trouble: None,
        compiles_forms: true,
    }
}

#[test]
fn a_tenant_sees_only_its_models() {
    let (models, _) = models();
    assert_eq!(models.list("acme", |_| true).data.len(), 2);
    assert_eq!(models.list("bolt", |_| true).data.len(), 1);
    let error = models.get("bolt", "closed").unwrap_err();
    assert_eq!(
        (error.kind, error.code.as_deref()),
        (ErrorKind::NotFound, Some("model_not_found"))
    );
    assert_eq!(
        models.get("acme", "closed").unwrap().stop_token_ids,
        [IM_END]
    );
}

#[test]
fn a_model_has_further_names_and_its_own_comes_first() {
    let mesh = MeshConfig::generate().unwrap();
    let config = |id: &str, also: &[&str]| ModelConfig {
        id: id.into(),
        files: "x".into(),
        also: also.iter().map(|name| (*name).to_owned()).collect(),
        ..ModelConfig::default()
    };
    let configs = [
        config("a", &["gpt-*", "claude-*-haiku"]),
        config("b", &["*", "gpt-5"]),
        config("gpt-4", &[]),
    ];
    let signer = NamespaceSigner::new(&mesh).unwrap();
    let models = Models::new(&configs, &|_| Ok(byte_level_files()), signer).unwrap();
    for (name, id) in [
        ("a", "a"),
        ("gpt-4", "gpt-4"),
        ("gpt-5", "b"),
        ("gpt-6", "a"),
        ("claude-9-haiku", "a"),
        ("claude-haiku", "b"),
        ("anything", "b"),
    ] {
        assert_eq!(models.get("t", name).unwrap().id, id, "{name}");
    }
    let listed = models.list("t", |_| true).data;
    let listed: Vec<_> = listed.iter().map(|card| card.id.as_str()).collect();
    assert_eq!(listed, ["a", "b", "gpt-5", "gpt-4"]);
}

#[test]
fn outputs_end_at_the_end_tokens_of_all_files() {
    let ends = |generation_config: &str| {
        let files = ModelFiles {
            generation_config_json: Some(generation_config.into()),
            ..byte_level_files()
        };
        Model::new(&ModelConfig::default(), &files)
            .unwrap()
            .stop_token_ids
    };
    assert_eq!(ends(r#"{"eos_token_id": [5, 7]}"#), [IM_END, 5, 7]);
    assert_eq!(ends(r#"{"eos_token_id": 5}"#), [IM_END, 5]);
    assert_eq!(ends("no JSON"), [IM_END]);
}

#[test]
fn one_worker_that_takes_requests_is_enough_to_be_ready() {
    let (models, _) = models();
    let of = |model: &str, open, trouble: &str| ServedModel {
        model: model.into(),
        open,
        trouble: Some(trouble.into()),
        ..served(&models, 2, 64)
    };
    let away = of(
        "open",
        Some(0),
        "the engine at http://10.0.0.5:8000 does not answer",
    );
    let drained = of("closed", Some(0), "drained by an operator");
    models.update(vec![away.clone(), drained]);
    let why = models.check_served().unwrap_err();
    assert_eq!(
        why,
        "no model can be served now. open: the engine at http://10.0.0.5:8000 does not answer; closed: drained \
         by an operator"
    );
    models.update(vec![away, of("closed", Some(1), "one of them drains")]);
    assert_eq!(models.check_served(), Ok(()));
    // A scheduler of an earlier version does not say.
    models.update(vec![of("open", None, "")]);
    assert_eq!(models.check_served(), Ok(()));
}

#[test]
fn a_model_is_served_by_workers_with_its_tokenizer() {
    let (models, _) = models();
    let open = models.get("a", "open").unwrap();
    assert!(models.check_served().is_err());
    assert_eq!(models.max_context(&open), 512);
    models.update(vec![ServedModel {
        tokenizer: "other".into(),
        ..served(&models, 1, 64)
    }]);
    assert!(models.check_served().is_err());
    models.update(vec![served(&models, 1, 64)]);
    assert!(models.check_served().is_ok() && models.compiles_forms(&open));
    assert_eq!(models.max_context(&open), 64);
    models.update(vec![served(&models, 0, 64)]);
    assert!(models.check_served().is_err() && !models.compiles_forms(&open));
    models.update(vec![ServedModel {
        compiles_forms: false,
        ..served(&models, 1, 64)
    }]);
    assert!(!models.compiles_forms(&open));
}

#[test]
fn a_model_of_a_text_only_engine_is_another_namespace() {
    let (models, auth) = models();
    let open = models.get("a", "open").unwrap();
    let config = ModelConfig {
        id: "open".into(),
        text_only: true,
        ..ModelConfig::default()
    };
    let by_text = Model::new(&config, &byte_level_files()).unwrap();
    assert!(serves(&served(&models, 1, 64), &open));
    assert!(!serves(&served(&models, 1, 64), &by_text));
    let ids = [&*open, &by_text].map(|model| {
        let signed = models.signer.sign(Namespace {
            tenant: "a".into(),
            model: model.id.clone(),
            tokenizer: model.tokenizer_identity.clone(),
        });
        auth.verify(&signed).unwrap()
    });
    assert_ne!(ids[0], ids[1]);
}

#[test]
fn namespaces_are_signed_once() {
    let (models, auth) = models();
    let open = models.get("a", "open").unwrap();
    let first = models.namespace("a", &open);
    assert_eq!(models.namespace("a", &open), first);
    assert_eq!(auth.verify(&first.signed).unwrap(), first.id);
    assert_ne!(models.namespace("b", &open).id, first.id);
}

#[test]
fn after_the_clock_is_set_back_namespaces_are_signed_anew() {
    let (models, auth) = models();
    let open = models.get("a", "open").unwrap();
    let signed = models.namespace("a", &open);
    let future_s = clock::unix_s() + 2 * NAMESPACE_TTL_S;
    let names = signed.signed.namespace.clone();
    let ahead = models.signer.sign_at(names, future_s);
    assert!(auth.verify(&ahead).is_err());
    let mut known = LruCache::new(SIGNED_MAX);
    known.put("a".to_owned(), Arc::new(ahead.into()));
    models.signed.lock().insert(open.id.clone(), known);
    assert!(auth.verify(&models.namespace("a", &open).signed).is_ok());
}

#[test]
fn bad_files_are_reported_with_the_models_name() {
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let config = ModelConfig {
        id: "m".into(),
        files: "/nowhere".into(),
        ..ModelConfig::default()
    };
    let read = |path: &str| ModelFiles::from_dir(path).map_err(anyhow::Error::from);
    let error = Models::new(&[config], &read, signer).err().unwrap();
    assert!(format!("{error:#}").contains("model m: files = \"/nowhere\""));
}

#[test]
fn a_faulty_template_turns_chat_off_and_nothing_else() {
    let model = |template: &[u8]| {
        let files = ModelFiles {
            chat_template: Some(template.into()),
            ..byte_level_files()
        };
        Model::new(
            &ModelConfig {
                id: "m".into(),
                ..ModelConfig::default()
            },
            &files,
        )
        .unwrap()
    };
    for (template, fault) in [
        (&b"{% nonsense %}"[..], "unknown statement nonsense"),
        (b"{{ nothing.at.all }}", "undefined"),
        (b"\xff", "utf-8"),
        (b"{{ '%1000000000d' | format(1) }}", "a value of more than"),
    ] {
        let model = model(template);
        assert!(model.template.is_none());
        let error = model.no_chat();
        assert_eq!(
            (error.kind, error.param.as_deref()),
            (ErrorKind::InvalidRequest, None)
        );
        assert_eq!(error.code.as_deref(), Some(CHAT_TEMPLATE_FAILED));
        let message = error.to_string();
        assert!(
            message.contains(fault) && message.contains("model m"),
            "{message}"
        );
    }
    // A template that refuses the small chat is sound.
    assert!(model(b"{{ raise_exception('no') }}").template.is_some());
    let files = ModelFiles {
        chat_template: None,
        ..byte_level_files()
    };
    let none = Model::new(&ModelConfig::default(), &files).unwrap();
    assert_eq!(none.no_chat().param.as_deref(), Some("model"));
}

#[test]
fn a_date_that_is_none_is_an_error_of_the_configuration() {
    let config = |date: &str| ModelConfig {
        template_date: Some(date.into()),
        ..ModelConfig::default()
    };
    Model::new(&config("2026-01-31"), &byte_level_files()).unwrap();
    let error = Model::new(&config("today"), &byte_level_files()).unwrap_err();
    assert!(format!("{error:#}").contains("template_date"), "{error:#}");
}
