//! How an operator's command for the draft store runs.

use refrain_service_kit::telemetry::install_crypto_provider;
use serde::Serialize;

/// Runs a command to its end.
///
/// # Errors
/// As the command, or there are no threads.
pub(crate) fn run<T>(command: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    install_crypto_provider();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(command)
}

/// Prints a reply as one JSON object, or as lines for people.
pub(crate) fn print(reply: &impl Serialize, as_json: bool, lines: &str) -> serde_json::Result<()> {
    match as_json {
        true => println!("{}", serde_json::to_string(reply)?),
        false => print!("{lines}"),
    }
    Ok(())
}
