//! A bar on the terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const WIDTH: usize = 30;

/// A line on standard error that is written anew now and then; nothing where that is no terminal.
pub(super) struct Bar {
    started: Instant,
    shown: Option<Instant>,
}

impl Bar {
    pub(super) fn new() -> Self {
        Bar {
            started: Instant::now(),
            shown: None,
        }
    }

    /// `share` is what is done, 0 to 1, where that is known.
    pub(super) fn show(&mut self, share: Option<f64>, documents: u64) {
        let is_due = |shown: Instant| shown.elapsed() >= Duration::from_millis(200);
        let mut stderr = std::io::stderr().lock();
        if self.shown.is_none_or(is_due) && stderr.is_terminal() {
            let line = line(share, documents, self.started.elapsed());
            let _ = write!(stderr, "\r\x1b[K{line}");
            let _ = stderr.flush();
            self.shown = Some(Instant::now());
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(share: Option<f64>, documents: u64, elapsed: Duration) -> String {
    let rate = documents as f64 / elapsed.as_secs_f64().max(0.001);
    let bar = share.map_or_else(String::new, |share| {
        let share = share.clamp(0.0, 1.0);
        let full = (share * WIDTH as f64) as usize;
        let (full, empty) = ("=".repeat(full), " ".repeat(WIDTH - full));
        format!("{:>3.0} % [{full}{empty}]  ", share * 100.0)
    });
    format!("{bar}{documents} documents, {rate:.0}/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_as_long_whatever_the_share() {
        let second = Duration::from_secs(1);
        assert_eq!(
            line(Some(0.5), 50, second),
            " 50 % [===============               ]  50 documents, 50/s"
        );
        assert!(line(Some(1.5), 1, second).starts_with("100 %"));
        assert_eq!(line(None, 4, second * 2), "4 documents, 2/s");
    }
}
