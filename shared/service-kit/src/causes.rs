//! The errors of others in plain words.

use std::error::Error;

/// The message of an error and those of its causes, with colons between them. The form for debugging of somebody
/// else's error is for nobody's log.
pub fn plain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        // Some errors repeat their cause.
        if !text.ends_with(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_told_once() {
        let error = anyhow::anyhow!("refused").context("connect: refused");
        assert_eq!(
            plain(&*error.context("no call")),
            "no call: connect: refused"
        );
    }

    #[tokio::test]
    async fn a_call_that_found_nobody_says_so_in_words() {
        crate::telemetry::install_crypto_provider();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let error = client.get("http://127.0.0.1:1/").send().await.unwrap_err();
        let text = plain(&error);
        assert!(
            text.contains("refused") && !text.contains("Error {"),
            "{text}"
        );
    }
}
