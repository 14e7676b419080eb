//! The addresses of engines that register.

use refrain_protocol::ApiError;
use reqwest::Url;

/// Longest URL of an engine, bytes.
const URL_BYTES_MAX: usize = 300;

/// The address of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    /// Base URL without a slash at its end. The same engine always has the same one.
    pub url: String,
    /// Host and port.
    pub id: String,
    /// The host alone. An address of the sixth version is in brackets.
    pub host: String,
}

impl EngineAddress {
    /// Reads a base URL.
    ///
    /// # Errors
    /// It has more than a scheme, a host and a port, or less.
    pub fn read(text: &str) -> Result<Self, ApiError> {
        let wrong = || {
            let message =
                "url: must be a scheme, a host and perhaps a port, such as http://10.0.0.5:30000";
            ApiError::invalid("url", message)
        };
        let url = Some(text).filter(|text| text.len() <= URL_BYTES_MAX);
        let url = url.and_then(|text| Url::parse(text.trim()).ok());
        let url = url.ok_or_else(wrong)?;
        let is_bare = url.username().is_empty()
            && url.password().is_none()
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none();
        let port = url.port_or_known_default();
        let (true, "http" | "https", Some(host), Some(port)) =
            (is_bare, url.scheme(), url.host_str(), port)
        else {
            return Err(wrong());
        };
        let id = format!("{host}:{port}");
        Ok(EngineAddress {
            url: format!("{}://{id}", url.scheme()),
            host: host.to_owned(),
            id,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<(String, String)> {
        let address = EngineAddress::read(text).ok()?;
        Some((address.url, address.id))
    }

    #[test]
    fn an_address_is_a_scheme_a_host_and_a_port_and_has_one_spelling() {
        let same = |url: &str, id: &str| Some((url.to_owned(), id.to_owned()));
        for text in [
            "http://10.0.0.5:30000",
            "http://10.0.0.5:30000/",
            " HTTP://10.0.0.5:30000",
            // The same address as a number.
            "http://167772165:30000",
        ] {
            let expected = same("http://10.0.0.5:30000", "10.0.0.5:30000");
            assert_eq!(read(text), expected, "{text}");
        }
        assert_eq!(read("http://Node"), same("http://node:80", "node:80"));
        assert_eq!(
            read("https://[::1]:8000"),
            same("https://[::1]:8000", "[::1]:8000")
        );
        let long = format!("http://{}", "h".repeat(400));
        for wrong in [
            "",
            "10.0.0.5:30000",
            "grpc://h:1",
            "file:///etc/passwd",
            "http://",
            "http://user@h:1",
            "http://user:word@h:1",
            "http://h:1/v1",
            "http://h:1/?x=1",
            "http://h:1/#x",
            &long,
        ] {
            let error = EngineAddress::read(wrong).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("url"), "{wrong}");
        }
    }
}
