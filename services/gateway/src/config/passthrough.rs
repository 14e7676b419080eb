//! The sections `[[gateway.passthrough]]` of the configuration.

use std::collections::BTreeSet;
use std::path::PathBuf;

use refrain_protocol::TenantName;
use refrain_protocol::names::name_fault;
use refrain_service_kit::config::is_http_url;
use serde::Deserialize;

/// A server for routes that the gateway does not have itself, such as embeddings or images. Requests go to it as they
/// are, behind the keys, limits, usage and access log of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct PassthroughConfig {
    /// Base URL of the server, without `/v1`, such as `http://embeddings:8000`.
    pub url: String,
    /// Its routes, such as `/v1/embeddings`. Those below a route belong to it: `/v1/files` has `/v1/files/7` as well.
    pub routes: Vec<String>,
    /// Its models, as requests name them. Several servers may have the same route with other models. Without any, it
    /// gets all requests of its routes that name no model, and those of models that no other server has.
    pub models: Vec<String>,
    /// A file with the key that the server asks for.
    pub api_key_file: Option<PathBuf>,
    /// Tenants that may use it. Empty: all.
    #[schemars(with = "Vec<String>")]
    pub tenants: Vec<TenantName>,
}

/// Routes of the gateway itself, which no server can have.
const OWN_ROUTES: [&str; 10] = [
    "/console",
    "/detokenize",
    "/health",
    "/metrics",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
];

impl PassthroughConfig {
    /// The faults of all sections, one sentence each.
    pub(crate) fn faults(servers: &[PassthroughConfig]) -> Vec<String> {
        let mut faults = Vec::new();
        let mut served = BTreeSet::new();
        for (place, server) in servers.iter().enumerate() {
            let mut fault = |text: String| faults.push(format!("passthrough[{place}].{text}"));
            if !is_http_url(&server.url) {
                fault("url: must be an http or https URL, such as http://embeddings:8000".into());
            }
            if server.routes.is_empty() {
                fault("routes: name at least one, such as /v1/embeddings".into());
            }
            for route in &server.routes {
                if !is_route(route) {
                    fault(format!(
                        "routes: {route}: must be a path such as /v1/embeddings"
                    ));
                }
                if OWN_ROUTES
                    .iter()
                    .any(|own| is_below(route, own) || is_below(own, route))
                {
                    fault(format!(
                        "routes: {route}: the gateway has this route itself"
                    ));
                }
                let models = server.models.iter().map(|model| Some(model.as_str()));
                let models: Vec<_> = match server.models.is_empty() {
                    true => vec![None],
                    false => models.collect(),
                };
                for model in models {
                    if !served.insert((route.as_str(), model)) {
                        let of =
                            model.map_or("no model".to_owned(), |model| format!("model {model}"));
                        fault(format!("routes: {route} with {of} has a server already"));
                    }
                }
            }
            for model in &server.models {
                if let Some(why) = name_fault(model) {
                    fault(format!("models: {model}: {why}"));
                }
            }
        }
        faults
    }
}

/// Whether a path is a route or below it.
pub(crate) fn is_below(path: &str, route: &str) -> bool {
    let rest = path.strip_prefix(route);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a text is a path without what would lead elsewhere.
fn is_route(text: &str) -> bool {
    let Some(path) = text.strip_prefix('/') else {
        return false;
    };
    let is_usual = |char: char| char.is_ascii_alphanumeric() || "_-.".contains(char);
    let is_segment = |segment: &str| {
        !segment.is_empty() && !segment.starts_with('.') && segment.chars().all(is_usual)
    };
    path.split('/').all(is_segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(routes: &[&str], models: &[&str]) -> PassthroughConfig {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        PassthroughConfig {
            url: "http://e:8000".into(),
            routes: texts(routes),
            models: texts(models),
            ..PassthroughConfig::default()
        }
    }

    #[test]
    fn faults_name_the_section_and_the_key() {
        let route = "/v1/embeddings";
        let sound = [
            server(&[route, "/v1/audio/speech"], &["a", "b"]),
            server(&[route], &["c"]),
            server(&[route, "/v1/files"], &[]),
        ];
        assert_eq!(PassthroughConfig::faults(&sound), Vec::<String>::new());
        for (wrong, key) in [
            (
                PassthroughConfig {
                    url: "e:8000".into(),
                    ..server(&[route], &["x"])
                },
                "url",
            ),
            (server(&[], &["x"]), "routes"),
            (server(&["v1/embeddings"], &["x"]), "routes"),
            (server(&["/v1/../admin"], &["x"]), "routes"),
            (server(&["/v1/models"], &["x"]), "routes"),
            (server(&["/v1"], &["x"]), "routes"),
            (server(&["/v1/responses/deep"], &["x"]), "routes"),
            (server(&[route], &["c"]), "routes"),
            (server(&[route], &[]), "routes"),
            (server(&[route], &[""]), "models"),
        ] {
            let servers = [sound.as_slice(), &[wrong]].concat();
            let faults = PassthroughConfig::faults(&servers);
            let begin = format!("passthrough[3].{key}: ");
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].starts_with(&begin), "{faults:?}");
        }
    }
}
