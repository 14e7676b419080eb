//! The configured token: when it may be missing at first, and for what it is refused.

use refrain_service_kit::clock;
use refrain_service_kit::mesh::NAMESPACE_TTL_S;

use super::*;

/// The keys of a mesh, and a store for one proposer after the other.
struct Keys {
    mesh: MeshConfig,
    signer: NamespaceSigner,
    store: Arc<FakeStore>,
}

impl Keys {
    fn new() -> Self {
        let mesh = MeshConfig::generate().unwrap();
        let signer = NamespaceSigner::new(&mesh).unwrap();
        Keys {
            mesh,
            signer,
            store: Arc::default(),
        }
    }

    fn start(&self, change: impl FnOnce(&mut PluginConfig)) -> anyhow::Result<Proposer> {
        let mut config = PluginConfig {
            mesh: self.mesh.clone().into(),
            ..PluginConfig::default()
        };
        change(&mut config);
        Proposer::start(config, TOKENIZER, |_, _| Ok(self.store.clone()))
    }

    fn token(&self) -> String {
        token_of(&sign(&self.signer, "model")).unwrap()
    }

    fn expired(&self) -> String {
        let namespace = sign(&self.signer, "model").namespace;
        let issued_at_s = clock::unix_s() - NAMESPACE_TTL_S - 60;
        token_of(&self.signer.sign_at(namespace, issued_at_s)).unwrap()
    }
}

fn emit(proposer: &Proposer, request: &str) {
    let begin = RequestStart {
        request: request.into(),
        prompt: vec![1, 2, 3, 1, 2],
        epoch: 1,
        ..RequestStart::default()
    };
    proposer.begin(begin).unwrap();
    proposer.extend(request, &[3, 7]);
    proposer.finish(request.into(), Some("stop"));
}

#[test]
fn an_expired_token_costs_the_drafts_and_not_the_engine() {
    let keys = Keys::new();
    let proposer = keys
        .start(|config| config.token = Some(keys.expired()))
        .unwrap();
    assert_eq!(proposer.metrics.token_failures.get(), 1);
    emit(&proposer, "a");
    assert!(proposer.drain(PATIENCE));
    assert_eq!(uploaded(&keys.store), []);
}

#[test]
fn a_token_file_is_waited_for() {
    let keys = Keys::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    // First no file, then half a token, then an expired one.
    let token = keys.token();
    for written in [None, Some(&token[..40]), Some(&*keys.expired())] {
        match written {
            None => assert!(!file.exists()),
            Some(written) => std::fs::write(&file, written).unwrap(),
        }
        let proposer = keys
            .start(|config| config.token_file = Some(file.clone()))
            .unwrap();
        assert!(proposer.metrics.token_failures.get() > 0);
        emit(&proposer, "before");
        // The file is moved there, so that a reader finds the old one or the whole new one.
        let whole = folder.path().join("whole");
        std::fs::write(&whole, &token).unwrap();
        std::fs::rename(&whole, &file).unwrap();
        wait_until(|| proposer.default_namespace.signed.lock().is_some());
        let known = uploaded(&keys.store).len();
        emit(&proposer, "after");
        assert!(proposer.drain(PATIENCE));
        assert_eq!(uploaded(&keys.store).len(), known + 1);
    }
}

#[test]
fn tokens_that_will_never_be_valid_are_refused() {
    let keys = Keys::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let foreign = Keys::new().token();
    let other = keys.signer.sign(Namespace {
        tokenizer: "another".into(),
        ..(*sign(&keys.signer, "model").namespace).clone()
    });
    for (token, why) in [
        (foreign, "not signed by the gateway of this mesh"),
        (token_of(&other).unwrap(), "another tokenizer"),
    ] {
        std::fs::write(&file, &token).unwrap();
        let of_file = keys.start(|config| config.token_file = Some(file.clone()));
        let of_token = keys.start(|config| config.token = Some(token));
        for refused in [of_file, of_token] {
            let error = format!("{:#}", refused.err().unwrap());
            assert!(error.contains(why), "{error}");
        }
    }
    let nonsense = keys.start(|config| config.token = Some("nonsense".into()));
    assert!(nonsense.err().unwrap().to_string().contains("not a token"));
}
