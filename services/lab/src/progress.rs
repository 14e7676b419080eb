//! A progress bar on standard error. Nothing is shown where standard error is not a terminal.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

/// Steps of the bar: shares are shown to a thousandth.
const BAR_STEPS: f64 = 1_000.0;

/// A line that shows how far a command is, and disappears when it is dropped.
pub struct ProgressLine {
    bar: ProgressBar,
}

impl Default for ProgressLine {
    fn default() -> Self {
        ProgressLine {
            bar: ProgressBar::no_length().with_finish(ProgressFinish::AndClear),
        }
    }
}

impl ProgressLine {
    /// Shows the share of the work that is done (0 to 1, `None` if unknown), and a message.
    pub fn show(&self, share: Option<f64>, message: String) {
        if let Some(share) = share {
            if self.bar.length().is_none() {
                self.bar.set_style(bar_style());
                self.bar.set_length(BAR_STEPS as u64);
            }
            self.bar
                .set_position((share.clamp(0.0, 1.0) * BAR_STEPS) as u64);
        }
        self.bar.set_message(message);
    }
}

fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template("{percent:>3} % [{bar:30}]  {msg}").map_or_else(
        |_| ProgressStyle::default_bar(),
        |style| style.progress_chars("=> "),
    )
}

#[cfg(test)]
mod tests {
    use indicatif::{InMemoryTerm, ProgressDrawTarget};

    use super::*;

    #[test]
    fn the_line_shows_share_and_message_and_disappears() {
        let terminal = InMemoryTerm::new(4, 80);
        let line = ProgressLine::default();
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        line.bar.set_draw_target(target);
        line.show(Some(0.5), "7 calls".into());
        line.bar.force_draw();
        let shown = terminal.contents();
        assert!(shown.starts_with(" 50 % [==============="), "{shown}");
        assert!(shown.ends_with("7 calls"), "{shown}");
        // More than all of the work is shown as all of it.
        line.show(Some(1.5), String::new());
        line.bar.force_draw();
        assert!(terminal.contents().starts_with("100 %"));
        drop(line);
        assert_eq!(terminal.contents(), "");
    }
}
