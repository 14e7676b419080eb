//! How messages for people name an engine.

use reqwest::Url;

/// The engine at `url`, with its host and port, and with the key of the configuration that names it. The rest of a
/// URL may be secret.
pub(crate) fn engine_words(url: Option<&str>, is_configured: bool) -> String {
    let url = url.and_then(|url| Url::parse(url).ok());
    let at = url.map(|url| format!(" at {}", url.origin().ascii_serialization()));
    let key = if is_configured { " (urls.engine)" } else { "" };
    match at {
        Some(at) => format!("the engine{at}{key}"),
        None => "the engine".to_owned(),
    }
}
