//! The signals that ask a process to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM, SIGINT and SIGHUP. There is no configuration to reload, so SIGHUP stops the process as well: its default
/// would end the process without a drain.
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` under `nohup`, which asks to ignore SIGHUP.
    hang_up: Option<Signal>,
}

impl StopSignals {
    /// Starts to listen.
    ///
    /// # Errors
    /// The system refuses to install a handler.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: match ignores_hang_ups(&status) {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
        })
    }

    /// Waits for the next signal.
    pub(crate) async fn received(&mut self) {
        let hang_up = async {
            match &mut self.hang_up {
                Some(hang_up) => hang_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = hang_up => {}
        }
    }
}

/// Whether a process was started with SIGHUP ignored, by its `/proc/*/status`: signal 1 is the lowest bit of a hex
/// mask. A system without such a file counts as no.
fn ignores_hang_ups(status: &str) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nohup_is_recognised_by_the_mask_of_ignored_signals() {
        let status =
            |mask: &str| format!("Name:\trefrain\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\n");
        assert!(ignores_hang_ups(&status("0000000000000001")));
        assert!(ignores_hang_ups(&status("0000000000001001")));
        assert!(!ignores_hang_ups(&status("0000000000001000")));
        assert!(!ignores_hang_ups(""));
    }
}
