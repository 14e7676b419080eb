//! The answer as one self-contained page: pictures, real passages that repeat, tables, and every word explained.

use std::fmt::Write;

use refrain_protocol::names::is_invisible;

use super::answer::Verdict;
use super::picture;
use super::repeats::Origin;
use super::report::{AnalyzeReport, PassageReport};
use super::speed::SpeedReport;
use crate::page::{self, escaped};

/// The words of the page, for readers who do not know them.
const WORDS: &str = include_str!("words.html");

/// Renders the page.
pub fn html(report: &AnalyzeReport) -> String {
    let mut page = page::head("Refrain: would drafts help?", 90);
    let answer = &report.answer;
    let _ = writeln!(
        page,
        "<h1>Would drafts help?</h1>\n<p class=\"answer\">{}</p>",
        escaped(&answer.sentence)
    );
    list(&mut page, "Why", &answer.details);
    list(&mut page, "What to do next", &answer.next);
    pictures(&mut page, report);
    if !report.passages.is_empty() {
        page.push_str("<h2>Passages of the log that repeat</h2>\n");
        key(&mut page);
        report
            .passages
            .iter()
            .for_each(|passage| show(&mut page, passage));
    }
    page.push_str("<h2>Figures</h2>\n");
    for lines in [report.speed_lines(), report.row_lines()] {
        if lines.len() > 1 {
            page.push_str(&page::table(&lines));
        }
    }
    page.push_str(WORDS);
    list(&mut page, "What was read", &report.log.sentences());
    list(
        &mut page,
        "How it was measured",
        &report.settings.assumptions(),
    );
    let logs = report.settings.logs.iter();
    let logs: Vec<String> = logs
        .map(|log| escaped(&log.display().to_string()))
        .collect();
    let _ = writeln!(
        page,
        "<footer><p>{}, Refrain {}. Logs: {}.</p><p><code>{}</code></p></footer>\n</body>\n</html>",
        report.date,
        report.version,
        logs.join(", "),
        escaped(&report.command)
    );
    page
}

fn list(page: &mut String, title: &str, sentences: &[String]) {
    let _ = writeln!(page, "<h2>{title}</h2>\n<ul>");
    for sentence in sentences {
        // Text between backticks is code.
        let pieces = sentence
            .split('`')
            .enumerate()
            .map(|(at, piece)| match at % 2 {
                0 => escaped(piece),
                _ => format!("<code>{}</code>", escaped(piece)),
            });
        let _ = writeln!(page, "<li>{}</li>", pieces.collect::<String>());
    }
    page.push_str("</ul>\n");
}

fn pictures(page: &mut String, report: &AnalyzeReport) {
    page.push_str("<div class=\"pictures\">\n");
    let mut figure = |caption: &str, picture: String| {
        let _ = writeln!(
            page,
            "<figure><figcaption>{caption}</figcaption>{picture}</figure>"
        );
    };
    if report.answer.verdict != Verdict::TooLittleData {
        let model = &report.settings.engine_model[0];
        let speeds: Vec<&SpeedReport> = report
            .speeds
            .iter()
            .filter(|speed| speed.engine_model == *model)
            .collect();
        figure(
            "How much faster decoding becomes. The upright line is decoding without drafts.",
            picture::speeds(&speeds),
        );
    }
    figure(
        "Where the text of the outputs stood before.",
        picture::origins(&report.origins),
    );
    if !report.memory.is_empty() {
        figure(
            "How the speed-up of the last quarter of the calls grows with what is remembered.",
            picture::memory(&report.memory),
        );
    }
    page.push_str("</div>\n");
}

/// The meaning of the colours of passages.
fn key(page: &mut String) {
    page.push_str("<p>Coloured text stood before in ");
    for origin in [Origin::Call, Origin::Session, Origin::Group, Origin::Others] {
        let _ = write!(
            page,
            "<mark class=\"{}\">{}</mark>, ",
            origin.class(),
            origin.name()
        );
    }
    page.push_str("and text without colour is the model's own.</p>\n");
}

fn show(page: &mut String, passage: &PassageReport) {
    let _ = write!(page, "<p>{}</p>\n<pre>", escaped(&passage.row));
    for (origin, text) in &passage.parts {
        let shown = |character: char| match character {
            '\n' | '\t' => character,
            hidden if is_invisible(hidden) => '\u{fffd}',
            character => character,
        };
        let text = escaped(&text.chars().map(shown).collect::<String>());
        let _ = match origin {
            Origin::New => write!(page, "{text}"),
            _ => write!(page, "<mark class=\"{}\">{text}</mark>", origin.class()),
        };
    }
    page.push_str("</pre>\n");
}
