//! Secrets, signatures, and how either is replaced.

use std::path::{Path, PathBuf};

use super::config::PUBLIC_KEYS_MAX;
use super::*;
use crate::clock;
use crate::clocks::CLOCK_SKEW_S_MAX;

fn namespace(tenant: &str) -> Namespace {
    Namespace {
        tenant: tenant.into(),
        model: "m".into(),
        tokenizer: "t".into(),
    }
}

#[test]
fn only_the_signature_of_the_gateway_is_valid() {
    let config = MeshConfig::generate().unwrap();
    assert!(config.faults(true).is_empty());
    let auth = MeshAuth::new(&config).unwrap();
    let signer = NamespaceSigner::new(&config).unwrap();
    let signed = signer.sign_at(namespace("acme"), 1_000_000);
    assert_eq!(
        auth.verify_at(&signed, 1_000_000).unwrap(),
        namespace("acme").id()
    );

    let mut forged = signed.clone();
    Arc::make_mut(&mut forged.namespace).tenant = "other".into();
    assert!(auth.verify_at(&forged, 1_000_000).is_err());
    let mut renewed = signed.clone();
    renewed.issued_at_s += 1;
    assert!(auth.verify_at(&renewed, 1_000_000).is_err());
    // Only what the gateway signed is remembered.
    assert_eq!(
        auth.verify_at(&signed, 1_000_000),
        Ok(namespace("acme").id())
    );
    let remembered = auth.inner.verified.lock();
    assert_eq!(
        remembered
            .iter()
            .map(|(_, (known, _))| known)
            .collect::<Vec<_>>(),
        [&signed]
    );
    drop(remembered);
    let stranger = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    assert!(
        auth.verify_at(&stranger.sign_at(namespace("acme"), 1_000_000), 1_000_000)
            .is_err()
    );
    assert!(
        auth.verify_at(&signed, 1_000_000 + NAMESPACE_TTL_S + 1)
            .is_err()
    );
    assert!(
        auth.verify_at(&signed, 1_000_000 - CLOCK_SKEW_S_MAX - 1)
            .is_err()
    );
}

#[test]
fn clocks_may_differ_by_the_configured_limit() {
    let mut config = MeshConfig::generate().unwrap();
    config.clock_skew_s_max = 600;
    let auth = MeshAuth::new(&config).unwrap();
    let signer = NamespaceSigner::new(&config).unwrap();
    let now_s = 1_000_000;
    let outcome = |issued_at_s| {
        let signed = signer.sign_at(namespace("acme"), issued_at_s);
        auth.verify_at(&signed, now_s).map(drop)
    };
    assert_eq!(outcome(now_s + 600), Ok(()));
    let ahead = outcome(now_s + 601).unwrap_err();
    assert_eq!(ahead.code.as_deref(), Some(code::CLOCK_SKEW));
    assert!(ahead.message.contains("601 s ahead"), "{}", ahead.message);
    assert_eq!(outcome(now_s - NAMESPACE_TTL_S), Ok(()));
    let old = outcome(now_s - NAMESPACE_TTL_S - 1).unwrap_err();
    assert_eq!(old.code.as_deref(), Some(code::NAMESPACE_EXPIRED));
}

#[test]
fn a_token_holds_what_was_signed() {
    let config = MeshConfig::generate().unwrap();
    let signed = NamespaceSigner::new(&config)
        .unwrap()
        .sign(namespace("acme"));
    let token = token_of(&signed).unwrap();
    assert_eq!(from_token(&format!("{token}\n")).unwrap(), signed);
    assert!(from_token(&token[1..]).is_err());
    assert!(from_token("").is_err());
}

#[test]
fn a_logged_configuration_holds_no_secret() {
    let config = MeshConfig::generate().unwrap();
    let logged = format!("{config:?}");
    assert!(!logged.contains(&config.secret));
    assert!(!logged.contains(&config.namespace_signing_key));
    assert!(logged.contains(&config.namespace_public_key));
}

#[test]
fn faults_name_the_keys() {
    let mut config = MeshConfig::generate().unwrap();
    config.namespace_signing_key = MeshConfig::generate().unwrap().namespace_signing_key;
    config.secret = "short".into();
    assert_eq!(config.faults(true).len(), 2);
    assert_eq!(config.faults(false).len(), 1);
    for (skew_s, faults) in [(0, 1), (1, 0), (43_200, 0), (43_201, 1)] {
        let mut config = MeshConfig::generate().unwrap();
        config.clock_skew_s_max = skew_s;
        assert_eq!(config.faults(false).len(), faults, "{skew_s}");
    }
    for (name, ca, faults) in [
        ("refrain-worker", Some("ca.pem"), 0),
        ("refrain-worker", None, 1),
        ("10.0.0.9:1", Some("ca.pem"), 1),
    ] {
        let mut config = MeshConfig::generate().unwrap();
        config.address_name = Some(name.into());
        config.ca = ca.map(Into::into);
        assert_eq!(config.faults(false).len(), faults, "{name} {ca:?}");
    }
}

/// The services of a mesh with this configuration: all that a gateway calls.
struct Service {
    auth: MeshAuth,
}

impl Service {
    fn new(config: &MeshConfig) -> Self {
        assert_eq!(config.faults(false), Vec::<String>::new());
        let auth = MeshAuth::new(config).unwrap();
        Service { auth }
    }

    /// Whether a call of a process with this configuration passes, with the namespaces that it signs.
    fn takes(&self, caller: &MeshConfig) -> bool {
        assert_eq!(caller.faults(true), Vec::<String>::new());
        let carried = MeshCredentials::open(caller, &Metrics::new().unwrap()).unwrap();
        let request = actix_web::test::TestRequest::default()
            .insert_header((MESH_SECRET_HEADER, &*carried.carried()))
            .to_http_request();
        let signed = NamespaceSigner::new(caller)
            .unwrap()
            .sign(namespace("acme"));
        // As a service of the previous version passes it on.
        let unnamed = SignedNamespace {
            kid: "".into(),
            ..signed.clone()
        };
        let verified = [signed, unnamed].map(|signed| self.auth.verify(&signed).is_ok());
        assert_eq!(verified[0], verified[1]);
        self.auth.check(&request, &[MeshRole::Gateway]).is_ok() && verified[0]
    }
}

/// Every process restarts at a time of its own, so in each step those of the step before meet those of this step.
fn all_meet_without_a_gap(steps: &[MeshConfig]) {
    for pair in steps.windows(2) {
        for (service, caller) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let takes = Service::new(&pair[service]).takes(&pair[caller]);
            assert!(takes, "{:?} refuses {:?}", pair[service], pair[caller]);
        }
    }
    let (first, last) = (&steps[0], &steps[steps.len() - 1]);
    assert!(!Service::new(last).takes(first));
}

#[test]
fn the_secret_is_replaced_in_three_steps_without_a_gap() {
    let old = MeshConfig::generate().unwrap();
    let new_secret = MeshConfig::generate().unwrap().secret;
    let both_accepted = MeshConfig {
        secrets_accepted: vec![new_secret.clone()],
        ..old.clone()
    };
    let new_carried = MeshConfig {
        secret: new_secret,
        secrets_accepted: vec![old.secret.clone()],
        ..old.clone()
    };
    let old_refused = MeshConfig {
        secrets_accepted: Vec::new(),
        ..new_carried.clone()
    };
    all_meet_without_a_gap(&[old, both_accepted, new_carried, old_refused]);
}

#[test]
fn the_signing_key_is_replaced_in_three_steps_without_a_gap() {
    let old = MeshConfig::generate().unwrap();
    let new = MeshConfig::generate().unwrap();
    let both_accepted = MeshConfig {
        namespace_public_keys: vec![new.namespace_public_key.clone()],
        ..old.clone()
    };
    let new_signs = MeshConfig {
        namespace_public_key: new.namespace_public_key,
        namespace_public_keys: vec![old.namespace_public_key.clone()],
        namespace_signing_key: new.namespace_signing_key,
        ..old.clone()
    };
    let old_refused = MeshConfig {
        namespace_public_keys: Vec::new(),
        ..new_signs.clone()
    };
    all_meet_without_a_gap(&[old, both_accepted, new_signs, old_refused]);
}

/// A mesh without a secret, of which this process has the credential in `path`.
fn with_credential(keys: &MeshConfig, issuer: &CredentialIssuer, path: &Path) -> MeshConfig {
    MeshConfig {
        secret: String::new(),
        issuer_public_keys: vec![issuer.public_key()],
        credential_file: Some(path.to_owned()),
        ..keys.clone()
    }
}

fn credential(issuer: &CredentialIssuer, role: MeshRole) -> String {
    let now_s = clock::unix_s();
    issuer.issue(role, "any", now_s, now_s + 600).unwrap()
}

#[test]
fn credentials_replace_the_secret_in_three_steps_without_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("credential");
    let (issuer, _) = CredentialIssuer::generate().unwrap();
    std::fs::write(&path, credential(&issuer, MeshRole::Gateway)).unwrap();
    let secret_only = MeshConfig::generate().unwrap();
    let credentials_only = with_credential(&secret_only, &issuer, &path);
    let both_accepted = MeshConfig {
        issuer_public_keys: vec![issuer.public_key()],
        ..secret_only.clone()
    };
    let credential_carried = MeshConfig {
        secret: secret_only.secret.clone(),
        ..credentials_only.clone()
    };
    let steps = [
        secret_only,
        both_accepted,
        credential_carried,
        credentials_only,
    ];
    all_meet_without_a_gap(&steps);
}

#[test]
fn without_a_secret_only_a_credential_of_the_mesh_passes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("credential");
    let (issuer, _) = CredentialIssuer::generate().unwrap();
    let (stranger, _) = CredentialIssuer::generate().unwrap();
    std::fs::write(&path, credential(&issuer, MeshRole::Scheduler)).unwrap();
    let keys = MeshConfig::generate().unwrap();
    let config = with_credential(&keys, &issuer, &path);
    let auth = MeshAuth::new(&config).unwrap();
    let check = |carried: &str, roles: &[MeshRole]| {
        let request = actix_web::test::TestRequest::default()
            .insert_header((MESH_SECRET_HEADER, carried))
            .to_http_request();
        auth.check(&request, roles).map_err(|error| error.kind)
    };
    let worker = credential(&issuer, MeshRole::Worker);
    assert!(check(&worker, &[MeshRole::Engine, MeshRole::Worker]).is_ok());
    assert_eq!(
        check(&worker, &[MeshRole::Operator]),
        Err(ErrorKind::Forbidden)
    );
    assert_eq!(check(&worker, &[]), Err(ErrorKind::Forbidden));
    let foreign = credential(&stranger, MeshRole::Operator);
    for refused in ["", "rmc-", &keys.secret, &foreign] {
        let outcome = check(refused, &MeshRole::ALL);
        assert_eq!(outcome, Err(ErrorKind::Unauthorized), "{refused}");
    }
    // A file with another mesh's credential is refused, and a new one of this mesh is carried within a second or so.
    let carried = || auth.credentials().carried();
    let before = carried();
    std::fs::write(&path, foreign).unwrap();
    assert!(MeshAuth::new(&config).is_err());
    assert_eq!(carried(), before);
    let renewed = credential(&issuer, MeshRole::Operator);
    std::fs::write(&path, format!("{renewed}\n")).unwrap();
    while *carried() != *renewed {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn a_signature_names_its_key() {
    let (mine, other) = (
        MeshConfig::generate().unwrap(),
        MeshConfig::generate().unwrap(),
    );
    let signed = NamespaceSigner::new(&mine).unwrap().sign(namespace("acme"));
    assert_eq!(signed.kid.len(), 2 * KID_BYTES);
    let refusal = MeshAuth::new(&other).unwrap().verify(&signed).unwrap_err();
    assert!(
        refusal.message.contains(&*signed.kid),
        "{}",
        refusal.message
    );
    // The name only chooses: it makes no other key's signature valid.
    let both = MeshConfig {
        namespace_public_keys: vec![other.namespace_public_key.clone()],
        ..mine
    };
    let mut renamed = signed;
    renamed.kid = NamespaceSigner::new(&other)
        .unwrap()
        .key
        .public
        .kid
        .as_str()
        .into();
    assert!(MeshAuth::new(&both).unwrap().verify(&renamed).is_err());
}

#[test]
fn secrets_and_keys_can_be_in_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| Some(folder.path().join(name));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let keys = MeshConfig::generate().unwrap();
    let in_files = MeshConfig {
        secret: String::new(),
        secret_file: path("secret"),
        namespace_signing_key: String::new(),
        namespace_signing_key_file: path("signing-key"),
        ..keys.clone()
    };
    assert!(in_files.has_keys());
    assert!(MeshAuth::new(&in_files).is_err(), "there is no file");
    write("secret", &format!("{}\n", keys.secret));
    write("signing-key", &format!("{}\n", keys.namespace_signing_key));
    assert!(Service::new(&keys).takes(&in_files) && Service::new(&in_files).takes(&keys));
    // The file is read again when it changes: both secrets are accepted, and then only the new one.
    let renewed = MeshConfig {
        secret: "n".repeat(32),
        ..keys.clone()
    };
    let service = Service::new(&in_files);
    let until = |caller: &MeshConfig, takes: bool| {
        while service.takes(caller) != takes {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    write("secret", &format!("{}\n{}\n", renewed.secret, keys.secret));
    until(&renewed, true);
    assert!(service.takes(&keys) && *service.auth.credentials().carried() == *renewed.secret);
    write("secret", &renewed.secret);
    until(&keys, false);
    assert!(service.takes(&renewed));

    let foreign = MeshConfig::generate().unwrap();
    write("signing-key", &foreign.namespace_signing_key);
    let error = NamespaceSigner::new(&in_files).err().unwrap().to_string();
    assert!(error.contains("namespace_signing_key_file"), "{error}");
    let twice = MeshConfig {
        secret_file: path("secret"),
        namespace_signing_key_file: path("signing-key"),
        ..keys
    };
    assert_eq!(twice.faults(true).len(), 2);
}

#[test]
fn keys_that_belong_together_are_checked() {
    let keys = MeshConfig::generate().unwrap();
    let path = |name: &str| Some(PathBuf::from(name));
    let faults = |change: &dyn Fn(&mut MeshConfig)| {
        let mut config = keys.clone();
        change(&mut config);
        config.faults(true).join("; ")
    };
    assert_eq!(faults(&|_| {}), "");
    assert_eq!(faults(&|config| config.ca = path("ca")), "");
    let alone = faults(&|config| config.certificate = path("cert"));
    assert!(alone.starts_with("mesh.certificate: give both"), "{alone}");
    let untrusting = faults(&|config| {
        (config.certificate, config.key) = (path("cert"), path("key"));
    });
    assert!(untrusting.contains("needs mesh.ca"), "{untrusting}");
    let short = faults(&|config| config.secrets_accepted = vec!["short".into()]);
    assert!(short.starts_with("mesh.secrets_accepted: must"), "{short}");
    let malformed = faults(&|config| config.namespace_public_keys = vec!["ab".into()]);
    assert!(
        malformed.starts_with("mesh.namespace_public_keys: must"),
        "{malformed}"
    );
    let issuer = keys.namespace_public_key.clone();
    let no_credential = faults(&|config| {
        config.secret = String::new();
        config.issuer_public_keys = vec![issuer.clone()];
    });
    assert!(
        no_credential.starts_with("mesh.credential_file: calls"),
        "{no_credential}"
    );
    let no_issuer = faults(&|config| config.credential_file = path("credential"));
    assert!(
        no_issuer.contains("needs mesh.issuer_public_keys"),
        "{no_issuer}"
    );
    let key = &keys.namespace_public_key;
    let many = faults(&|config| config.namespace_public_keys = vec![key.clone(); PUBLIC_KEYS_MAX]);
    assert!(many.contains("fewer than"), "{many}");
    // A gateway may sign with any key that services accept.
    let new = MeshConfig::generate().unwrap();
    let signs_with_other = faults(&|config| {
        config.namespace_public_keys = vec![new.namespace_public_key.clone()];
        config.namespace_signing_key = new.namespace_signing_key.clone();
    });
    assert_eq!(signs_with_other, "");
}

#[test]
fn a_credential_that_is_not_the_process_s_own_is_refused_at_the_start_and_later() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credential");
    let (issuer, _) = CredentialIssuer::generate().unwrap();
    let config = MeshConfig {
        secret: String::new(),
        issuer_public_keys: vec![issuer.public_key()],
        credential_file: Some(file.clone()),
        ..MeshConfig::generate().unwrap()
    };
    let now_s = clock::unix_s();
    let issue = |role, name: &str| issuer.issue(role, name, now_s, now_s + 3_600).unwrap();
    let metrics = Metrics::new().unwrap();
    let open = || {
        MeshCredentials::open_own(&config, &metrics, |own| {
            let is_own = own.role == MeshRole::Worker && own.is_of("w-1");
            anyhow::ensure!(is_own, "another's");
            Ok(())
        })
    };
    for (role, name) in [(MeshRole::Gateway, "w-1"), (MeshRole::Worker, "w-2")] {
        std::fs::write(&file, issue(role, name)).unwrap();
        let error = format!("{:#}", open().err().unwrap());
        assert!(error.contains("another's"), "{error}");
    }
    let own = issue(MeshRole::Worker, "w-1");
    std::fs::write(&file, &own).unwrap();
    let credentials = open().unwrap();
    let reloads = &metrics.http().reloads;
    let looked = |outcome| reloads.with_label_values(&["mesh credential", outcome]);
    for (role, name) in [(MeshRole::Gateway, "w-1"), (MeshRole::Worker, "w-2")] {
        let refused = looked("refused").get();
        std::fs::write(&file, issue(role, name)).unwrap();
        while looked("refused").get() == refused {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(*credentials.carried(), *own);
    }
    let renewed = issuer.issue(MeshRole::Worker, "w-*", now_s, now_s + 7_200);
    let renewed = renewed.unwrap();
    std::fs::write(&file, &renewed).unwrap();
    while looked("loaded").get() == 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(*credentials.carried(), *renewed);
}
