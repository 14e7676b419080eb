//! Callers with tokens of an identity provider, whose keys are fetched over HTTP.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use refrain_accounts::tenants::jwt::JwtConfig;
use refrain_gateway::GatewayConfig;
use refrain_service_kit::clock;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::rsa::PublicKeyComponents;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256,
    RsaKeyPair,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::mesh::{Bench, chat, config};

/// A private key for these tests, which opens nothing.
const RSA_KEY: &str = include_str!("rsa_key.b64");

fn base64(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

enum Key {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

/// A key of the issuer with its id.
struct Signer {
    kid: String,
    key: Key,
}

impl Signer {
    fn ed(kid: &str) -> Self {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let key = Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap();
        Signer {
            kid: kid.into(),
            key: Key::Ed(key),
        }
    }

    fn ec(kid: &str) -> Self {
        let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).unwrap();
        Signer {
            kid: kid.into(),
            key: Key::Ec(key),
        }
    }

    fn rsa(kid: &str) -> Self {
        let der = STANDARD.decode(RSA_KEY.replace('\n', "")).unwrap();
        Signer {
            kid: kid.into(),
            key: Key::Rsa(RsaKeyPair::from_pkcs8(&der).unwrap()),
        }
    }

    fn algorithm(&self) -> &'static str {
        match &self.key {
            Key::Rsa(_) => "RS256",
            Key::Ec(_) => "ES256",
            Key::Ed(_) => "EdDSA",
        }
    }

    fn jwk(&self) -> Value {
        let mut jwk = match &self.key {
            Key::Rsa(key) => {
                let public = PublicKeyComponents::<Vec<u8>>::from(key.public());
                json!({"kty": "RSA", "n": base64(&public.n), "e": base64(&public.e)})
            }
            Key::Ec(key) => {
                let (x, y) = key.public_key().as_ref()[1..].split_at(32);
                json!({"kty": "EC", "crv": "P-256", "x": base64(x), "y": base64(y)})
            }
            Key::Ed(key) => {
                let x = base64(key.public_key().as_ref());
                json!({"kty": "OKP", "crv": "Ed25519", "x": x})
            }
        };
        jwk["kid"] = self.kid.clone().into();
        jwk["use"] = "sig".into();
        jwk
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        match &self.key {
            Key::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(
                    &RSA_PKCS1_SHA256,
                    &SystemRandom::new(),
                    message,
                    &mut signature,
                )
                .unwrap();
                signature
            }
            Key::Ec(key) => {
                let signature = key.sign(&SystemRandom::new(), message).unwrap();
                signature.as_ref().to_vec()
            }
            Key::Ed(key) => key.sign(message).as_ref().to_vec(),
        }
    }

    /// A token with usual claims and these changes; null removes one.
    fn token(&self, changes: Value) -> String {
        let header = json!({"alg": self.algorithm(), "typ": "JWT", "kid": self.kid});
        token(&header, &claims(changes), |message| self.sign(message))
    }
}

fn claims(changes: Value) -> Value {
    let now = clock::unix_s();
    let mut claims = json!({
        "iss": "https://idp.test", "aud": ["other", "refrain"], "sub": "ann", "tenant": "acme",
        "exp": now + 300, "nbf": now,
    });
    for (name, value) in changes.as_object().unwrap() {
        claims[name] = value.clone();
    }
    let claims = claims.as_object().unwrap().clone();
    let claims = claims.into_iter().filter(|(_, value)| !value.is_null());
    Value::Object(claims.collect())
}

fn token(header: &Value, claims: &Value, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let part = |value: &Value| base64(value.to_string().as_bytes());
    let message = format!("{}.{}", part(header), part(claims));
    let signature = base64(&sign(message.as_bytes()));
    format!("{message}.{signature}")
}

/// The issuer's server of its keys.
#[derive(Clone)]
struct Issuer {
    url: String,
    keys: Arc<Mutex<Value>>,
    asked: Arc<AtomicUsize>,
    is_away: Arc<AtomicBool>,
}

impl Issuer {
    async fn new(keys: &[&Signer]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let issuer = Issuer {
            url: format!("http://{}/keys", listener.local_addr().unwrap()),
            keys: Arc::default(),
            asked: Arc::default(),
            is_away: Arc::default(),
        };
        issuer.publish(keys);
        let serving = issuer.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    match stream.read_u8().await {
                        Ok(byte) => head.push(byte),
                        Err(_) => break,
                    }
                }
                serving.asked.fetch_add(1, Ordering::SeqCst);
                let (status, body) = match serving.is_away.load(Ordering::SeqCst) {
                    true => ("503 Away", String::new()),
                    false => ("200 OK", serving.keys.lock().unwrap().to_string()),
                };
                let answer = format!(
                    "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                    body.len()
                );
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        issuer
    }

    fn publish(&self, keys: &[&Signer]) {
        let keys: Vec<Value> = keys.iter().map(|key| key.jwk()).collect();
        *self.keys.lock().unwrap() = json!({"keys": keys});
    }

    fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn config(&self) -> JwtConfig {
        JwtConfig {
            issuer: "https://idp.test".into(),
            audience: "refrain".into(),
            jwks_url: Some(self.url.clone()),
            models_claim: Some("models".into()),
            endpoints_claim: Some("endpoints".into()),
            ..JwtConfig::default()
        }
    }
}

fn with(jwt: JwtConfig) -> GatewayConfig {
    GatewayConfig {
        jwt: Some(jwt),
        ..config()
    }
}

/// The status of a chat with a key or token, and the message and code of its error.
async fn answer(bench: &Bench, key: &str) -> (u16, String, String) {
    let url = format!("{}/v1/chat/completions", bench.url);
    let request = bench.client.post(url).bearer_auth(key);
    let answer = request.json(&chat(json!({}))).send().await.unwrap();
    let status = answer.status().as_u16();
    let body: Value = answer.json().await.unwrap();
    let text = |field: &str| body["error"][field].as_str().unwrap_or_default().to_owned();
    (status, text("message"), text("code"))
}

async fn status(bench: &Bench, key: &str) -> u16 {
    answer(bench, key).await.0
}

#[tokio::test]
async fn tokens_of_all_three_algorithms_open_their_tenant() {
    let signers = [Signer::rsa("r"), Signer::ec("c"), Signer::ed("d")];
    let issuer = Issuer::new(&signers.iter().collect::<Vec<_>>()).await;
    let bench = Bench::with(with(issuer.config())).await;
    for signer in &signers {
        let token = signer.token(json!({}));
        for _ in 0..2 {
            assert_eq!(answer(&bench, &token).await, (200, "".into(), "".into()));
        }
        // The signature is of these claims and no others.
        let (message, signature) = token.rsplit_once('.').unwrap();
        let (header, _) = message.split_once('.').unwrap();
        let other = base64(claims(json!({"tenant": "bolt"})).to_string().as_bytes());
        let forged = format!("{header}.{other}.{signature}");
        let (status, message, code) = answer(&bench, &forged).await;
        assert_eq!((status, &*code), (401, "invalid_token"));
        assert!(message.contains("signature"), "{message}");
    }
    assert_eq!(bench.metric("refrain_gateway_tokens_remembered"), 3.0);
    // Keys go on beside tokens, and Anthropic's header takes both.
    assert_eq!(status(&bench, "sk-acme").await, 200);
    let url = format!("{}/v1/models", bench.url);
    let models = bench
        .client
        .get(url)
        .header("x-api-key", signers[2].token(json!({})));
    assert_eq!(models.send().await.unwrap().status(), 200);
    assert_eq!(issuer.asked(), 1, "a known key is not fetched again");
}

#[tokio::test]
async fn a_token_that_is_not_right_is_refused_with_the_reason() {
    let signer = Signer::ed("d");
    let issuer = Issuer::new(&[&signer]).await;
    let bench = Bench::with(with(issuer.config())).await;
    let now = clock::unix_s();
    for (changes, part) in [
        (json!({"iss": "https://other.test"}), "issuer"),
        (json!({"iss": null}), "iss"),
        (json!({"aud": "other"}), "audience"),
        (json!({"aud": null}), "aud"),
        (json!({"exp": now - 60}), "expired"),
        (json!({"exp": null}), "exp"),
        (json!({"exp": "never"}), "exp"),
        (json!({"nbf": now + 120}), "not valid yet"),
        (json!({"iss": ["https://idp.test"]}), "iss"),
        (json!({"tenant": null}), "tenant"),
        (json!({"tenant": "acme\u{1f}key:0123456789ab"}), "tenant"),
        (json!({"endpoints": ["everything"]}), "endpoint"),
        (json!({"models": []}), "models"),
    ] {
        let (status, message, code) = answer(&bench, &signer.token(changes.clone())).await;
        assert_eq!((status, &*code), (401, "invalid_token"), "{changes}");
        assert!(message.contains(part), "{changes}: {message}");
    }
    let (status, _, code) = answer(&bench, &signer.token(json!({"tenant": "nobody"}))).await;
    assert_eq!((status, &*code), (403, "unknown_tenant"));
    let scoped = signer.token(json!({"endpoints": "completions"}));
    assert_eq!(self::status(&bench, &scoped).await, 403);
    let scoped = signer.token(json!({"models": "another-model"}));
    assert_eq!(self::status(&bench, &scoped).await, 404);
    let long = signer.token(json!({"padding": "x".repeat(9_000)}));
    assert!(answer(&bench, &long).await.1.contains("too long"));
}

#[tokio::test]
async fn no_token_decides_how_it_is_checked() {
    let signer = Signer::rsa("r");
    let issuer = Issuer::new(&[&signer]).await;
    let bench = Bench::with(with(issuer.config())).await;
    let none = json!({"alg": "none", "kid": "r"});
    let unsigned = token(&none, &claims(json!({})), |_| Vec::new());
    // The public key as the secret of an HMAC, in the forms in which one may have it.
    let modulus = URL_SAFE_NO_PAD
        .decode(signer.jwk()["n"].as_str().unwrap())
        .unwrap();
    let hs256 = json!({"alg": "HS256", "kid": "r"});
    let confused = |secret: &[u8]| {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let sign = |message: &[u8]| hmac::sign(&key, message).as_ref().to_vec();
        token(&hs256, &claims(json!({})), sign)
    };
    let by_text = confused(signer.jwk().to_string().as_bytes());
    let by_modulus = confused(&modulus);
    // Another algorithm of the same family, and of another one.
    let other = |alg: &str| {
        let header = json!({"alg": alg, "kid": "r"});
        token(&header, &claims(json!({})), |message| signer.sign(message))
    };
    let critical = json!({"alg": "RS256", "kid": "r", "crit": ["exp"], "exp": 1});
    let critical = token(&critical, &claims(json!({})), |message| {
        signer.sign(message)
    });
    let right = signer.token(json!({}));
    let (message, _) = right.rsplit_once('.').unwrap();
    for wrong in [
        unsigned,
        by_text,
        by_modulus,
        other("PS256"),
        other("RS512"),
        other("ES256"),
        other("EdDSA"),
        critical,
        format!("{message}."),
        "eyJ.eyJ.x".into(),
        "eyJ..".into(),
    ] {
        let (status, _, code) = answer(&bench, &wrong).await;
        assert_eq!((status, &*code), (401, "invalid_token"), "{wrong}");
    }
    assert_eq!(status(&bench, &right).await, 200);
}

#[tokio::test]
async fn keys_are_fetched_anew_for_an_unknown_one_and_old_ones_stay_while_the_issuer_is_away() {
    let (old, new) = (Signer::ed("old"), Signer::ec("new"));
    let issuer = Issuer::new(&[&old]).await;
    let bench = Bench::with(with(issuer.config())).await;
    issuer.set_away(true);
    let of_old = old.token(json!({}));
    assert_eq!(status(&bench, &of_old).await, 200);
    // The first unknown key asks the issuer, who is away. Others follow too soon to ask again.
    for _ in 0..5 {
        assert_eq!(status(&bench, &new.token(json!({}))).await, 401);
    }
    assert_eq!(issuer.asked(), 2);
    assert_eq!(status(&bench, &old.token(json!({"sub": "ben"}))).await, 200);
    let failed = "refrain_gateway_jwks_read_total{outcome=\"failed\"}";
    assert_eq!(bench.metric(failed), 1.0);

    // At another gateway nobody asked before, so a rotation is seen at once. Tokens by the old key end.
    issuer.set_away(false);
    let second = Bench::with(with(issuer.config())).await;
    assert_eq!(status(&second, &of_old).await, 200);
    issuer.publish(&[&new]);
    assert_eq!(status(&second, &new.token(json!({}))).await, 200);
    assert_eq!(status(&second, &of_old).await, 401);

    // An issuer that has withdrawn all keys is no issuer that is away.
    issuer.publish(&[]);
    let third = Bench::with(with(issuer.config())).await;
    let (status, _, code) = answer(&third, &new.token(json!({}))).await;
    assert_eq!((status, &*code), (401, "invalid_token"));
}

#[tokio::test]
async fn a_gateway_starts_without_the_issuer_and_tokens_wait() {
    let signer = Signer::ed("d");
    let issuer = Issuer::new(&[&signer]).await;
    issuer.set_away(true);
    let bench = Bench::with(with(issuer.config())).await;
    let (status, _, code) = answer(&bench, &signer.token(json!({}))).await;
    assert_eq!((status, &*code), (503, "issuer_unavailable"));
    assert_eq!(self::status(&bench, "sk-acme").await, 200);
    // One gateway more, with a large answer that is not read to its end.
    *issuer.keys.lock().unwrap() = json!({"keys": ["x".repeat(3 << 20)]});
    issuer.set_away(false);
    let large = Bench::with(with(issuer.config())).await;
    assert_eq!(self::status(&large, &signer.token(json!({}))).await, 503);
}

#[tokio::test]
async fn keys_in_a_file_are_followed_and_unknown_tenants_may_be_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys.json");
    let (old, new) = (Signer::ed("old"), Signer::ed("new"));
    let write = |keys: &[&Signer]| {
        let keys: Vec<Value> = keys.iter().map(|key| key.jwk()).collect();
        std::fs::write(&path, json!({"keys": keys}).to_string()).unwrap();
    };
    write(&[&old]);
    let jwt = JwtConfig {
        issuer: "https://idp.test".into(),
        audience: "refrain".into(),
        jwks_file: Some(path.clone()),
        unknown_tenants: true,
        ..JwtConfig::default()
    };
    let bench = Bench::with(with(jwt)).await;
    let nobody = json!({"tenant": "nobody"});
    assert_eq!(status(&bench, &old.token(nobody.clone())).await, 200);
    write(&[&old, &new]);
    for attempt in 0.. {
        if status(&bench, &new.token(nobody.clone())).await == 200 {
            break;
        }
        assert!(attempt < 6_000, "the file is not followed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status(&bench, &old.token(nobody)).await, 200);
}
