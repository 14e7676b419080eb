//! Requests that other servers answer: embeddings, images and the like, behind the keys and limits of this gateway.
//!
//! Nothing in a request or an answer is changed, but for what belongs to one connection and for keys. The `usage` of
//! an answer is read, for bills. The route is in `http/passed.rs`.

mod answer;

use std::sync::Arc;

use actix_web::HttpRequest;
use anyhow::Context as _;
use bytes::Bytes;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{failed_call_kind, pass_request_heads};
use serde::Deserialize;

pub(crate) use self::answer::{PassedAnswer, PassedRequest};
use crate::config::passthrough::{PassthroughConfig, is_below};
use crate::models::{is_open, unknown_model};

/// Heads of a request that end here: the caller's keys, and how the body was compressed. The answer comes plain, so
/// that its usage can be read.
const OF_CALLER: [&str; 5] = [
    "accept-encoding",
    "authorization",
    "content-encoding",
    "cookie",
    "x-api-key",
];

/// The servers for routes that the gateway does not have.
pub(crate) struct Passthrough {
    servers: Vec<Arc<PassedServer>>,
    http: reqwest::Client,
}

/// A server, and the key that it asks for.
pub(crate) struct PassedServer {
    config: PassthroughConfig,
    api_key: Option<String>,
}

impl Passthrough {
    /// Reads the keys of the servers.
    ///
    /// # Errors
    /// A file of a key cannot be read.
    pub(crate) fn new(configs: &[PassthroughConfig]) -> anyhow::Result<Self> {
        let server = |(place, config): (usize, &PassthroughConfig)| {
            let key = config.api_key_file.as_ref().map(std::fs::read_to_string);
            let key = key.transpose();
            let at = || format!("gateway.passthrough[{place}].api_key_file");
            anyhow::Ok(Arc::new(PassedServer {
                api_key: key.with_context(at)?.map(|key| key.trim().to_owned()),
                config: config.clone(),
            }))
        };
        let servers = configs.iter().enumerate().map(server);
        Ok(Passthrough {
            servers: servers.collect::<anyhow::Result<_>>()?,
            // Answers go on as they come: neither followed elsewhere nor decompressed.
            http: reqwest::Client::builder()
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .build()?,
        })
    }

    /// All routes of all servers.
    pub(crate) fn routes(&self) -> impl Iterator<Item = &str> {
        let servers = self.servers.iter();
        servers.flat_map(|server| server.config.routes.iter().map(String::as_str))
    }

    /// The models of a tenant.
    pub(crate) fn models<'a>(&'a self, tenant: &'a str) -> impl Iterator<Item = &'a str> {
        let open = self
            .servers
            .iter()
            .filter(|server| server.is_open_to(tenant));
        open.flat_map(|server| server.config.models.iter().map(String::as_str))
    }

    /// Sends a request to a server, and returns the head of the answer.
    ///
    /// # Errors
    /// The server cannot be reached, or breaks the connection off.
    pub(crate) async fn call(
        &self,
        server: &PassedServer,
        request: &HttpRequest,
        body: Bytes,
    ) -> Result<reqwest::Response, ApiError> {
        let method = reqwest::Method::from_bytes(request.method().as_str().as_bytes());
        let method = method.map_err(ApiError::internal)?;
        let call = self.http.request(method, server.url(request));
        let ends_here = |name: &str| OF_CALLER.contains(&name);
        let call = pass_request_heads(request.headers(), call, ends_here);
        let mut call = call.body(body);
        if let Some(key) = &server.api_key {
            call = call.bearer_auth(key);
        }
        call.send()
            .await
            .map_err(|error| unreachable_server(&error))
    }

    /// The server of a request, and the name under which it is counted.
    ///
    /// # Errors
    /// `NotFound` if no server has the model.
    pub(crate) fn find(
        &self,
        tenant: &str,
        path: &str,
        model: Option<&str>,
    ) -> Result<(Arc<PassedServer>, String), ApiError> {
        let of_route = || {
            let servers = self
                .servers
                .iter()
                .filter(|server| server.is_open_to(tenant));
            servers.filter_map(|server| {
                let mut routes = server.config.routes.iter();
                Some((server, routes.find(|route| is_below(path, route))?))
            })
        };
        let has = |server: &PassedServer| {
            let mut models = server.config.models.iter();
            model.is_some_and(|model| models.any(|known| known == model))
        };
        let named = of_route().find(|(server, _)| has(server));
        let found =
            named.or_else(|| of_route().find(|(server, _)| server.config.models.is_empty()));
        let (server, route) = found.ok_or_else(unknown_model)?;
        let counted = match model.filter(|_| has(server)) {
            Some(model) => model,
            // Callers choose other names, which are no labels.
            None => route,
        };
        Ok((server.clone(), counted.to_owned()))
    }
}

impl PassedServer {
    fn is_open_to(&self, tenant: &str) -> bool {
        is_open(&self.config.tenants, tenant)
    }

    /// The URL of a request. A path of a request is below a route, so it cannot lead to another host.
    fn url(&self, request: &HttpRequest) -> String {
        let base = self.config.url.trim_end_matches('/');
        match request.query_string() {
            "" => format!("{base}{}", request.path()),
            query => format!("{base}{}?{query}", request.path()),
        }
    }
}

/// The error of a server that could not be asked. It does not tell the server's address.
fn unreachable_server(error: &reqwest::Error) -> ApiError {
    let kind = failed_call_kind(error);
    let message = match kind {
        ErrorKind::Unavailable => "the server behind this route cannot be reached; try again",
        _ => "the server behind this route did not answer",
    };
    ApiError::new(kind, message).with_detail(error)
}

/// The model that a body of this content type names: in JSON, or in a form as audio is sent.
pub(crate) fn model_of(kind: &str, body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    if !kind.starts_with("multipart/form-data") {
        return serde_json::from_slice::<Named>(body).ok()?.model;
    }
    let mark = b"name=\"model\"\r\n\r\n";
    let at = body.windows(mark.len()).position(|window| window == mark)?;
    let value = &body[at + mark.len()..];
    let end = value.windows(2).position(|window| window == b"\r\n")?;
    Some(std::str::from_utf8(&value[..end]).ok()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_in_json_and_in_forms() {
        let form = "--x\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nRIFF\r\n--x\r\n\
            Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--x--\r\n";
        for (kind, body, model) in [
            (
                "application/json",
                "{\"input\": \"a\", \"model\": \"m\"}",
                Some("m"),
            ),
            ("application/json", "{\"input\": \"a\"}", None),
            ("application/json", "no JSON", None),
            ("multipart/form-data; boundary=x", form, Some("whisper")),
            ("multipart/form-data; boundary=x", "--x--", None),
        ] {
            let found = model_of(kind, body.as_bytes());
            assert_eq!(found.as_deref(), model, "{body}");
        }
    }

    #[test]
    fn the_server_of_a_model_comes_before_that_of_the_route() {
        let server = |url: &str, models: &[&str]| PassthroughConfig {
            url: url.into(),
            routes: vec!["/v1/embeddings".into(), "/v1/files".into()],
            models: models.iter().map(|model| (*model).to_owned()).collect(),
            ..PassthroughConfig::default()
        };
        let closed = PassthroughConfig {
            tenants: vec!["bolt".parse().unwrap()],
            ..server("http://c", &["closed"])
        };
        refrain_service_kit::telemetry::install_crypto_provider();
        let servers = [
            server("http://any", &[]),
            server("http://a", &["a"]),
            closed,
        ];
        let passthrough = Passthrough::new(&servers).unwrap();
        let found = |tenant, path, model| {
            let found = passthrough.find(tenant, path, model);
            found
                .map(|(server, counted)| (server.config.url.clone(), counted))
                .ok()
        };
        let some = |url: &str, counted: &str| Some((url.to_owned(), counted.to_owned()));
        for (tenant, path, model, expected) in [
            ("t", "/v1/embeddings", Some("a"), some("http://a", "a")),
            (
                "t",
                "/v1/embeddings",
                Some("odd"),
                some("http://any", "/v1/embeddings"),
            ),
            ("t", "/v1/files/7", None, some("http://any", "/v1/files")),
            ("t", "/v1/filesystem", None, None),
            (
                "bolt",
                "/v1/embeddings",
                Some("closed"),
                some("http://c", "closed"),
            ),
            (
                "t",
                "/v1/embeddings",
                Some("closed"),
                some("http://any", "/v1/embeddings"),
            ),
        ] {
            assert_eq!(found(tenant, path, model), expected, "{path} {model:?}");
        }
        assert_eq!(passthrough.models("t").collect::<Vec<_>>(), ["a"]);
        assert_eq!(
            passthrough.models("bolt").collect::<Vec<_>>(),
            ["a", "closed"]
        );
    }
}
