//! The pictures of the page, in the page's own colours.

use std::fmt::Write;

use super::answer::{count_words, percent};
use super::bootstrap::Range;
use super::repeats::Origins;
use super::speed::{MemoryPoint, SpeedReport};

/// Width of a picture in its own units; heights follow. Text of 12 units stays readable on a telephone.
const WIDTH: f64 = 320.0;
/// Where bars begin and how long they are at most; texts are on both sides.
const BAR: (f64, f64) = (72.0, 150.0);
const BAR_HEIGHT: f64 = 18.0;

/// How much faster decoding becomes: three bars for each number of requests at once.
pub(super) fn speeds(speeds: &[&SpeedReport]) -> String {
    let ends = speeds.iter().flat_map(|speed| {
        let high = speed.decoding.map(|range| range.high);
        [high, speed.ngram, speed.head].into_iter().flatten()
    });
    let longest = ends.fold(1.0, f64::max);
    let x = |speedup: f64| BAR.0 + BAR.1 * speedup / longest;
    let mut svg = String::new();
    let mut y = 0.0;
    for speed in speeds {
        text(
            &mut svg,
            0.0,
            y + 14.0,
            &format!("{} at once", speed.concurrency),
        );
        y += 20.0;
        let alone = |speedup: Option<f64>| speedup.map(Range::exact);
        for (name, class, range) in [
            ("Refrain", "session", speed.decoding),
            ("n-grams", "call", alone(speed.ngram)),
            ("EAGLE-3", "group", alone(speed.head)),
        ] {
            let Some(range) = range else { continue };
            rect(
                &mut svg,
                class,
                (BAR.0, y),
                (x(range.estimate) - BAR.0, BAR_HEIGHT - 4.0),
            );
            if range.low < range.high {
                line(
                    &mut svg,
                    "range",
                    (x(range.low), y + 7.0),
                    (x(range.high), y + 7.0),
                );
            }
            text(&mut svg, 8.0, y + 11.0, name);
            text(&mut svg, x(range.high) + 5.0, y + 11.0, &range.words());
            y += BAR_HEIGHT;
        }
        y += 8.0;
    }
    // Plain decoding.
    line(&mut svg, "axis", (x(1.0), 16.0), (x(1.0), y - 6.0));
    chart("Speed-up of decoding by requests at once", y, &svg)
}

/// Where the output tokens stood before: a bar for each place.
pub(super) fn origins(origins: &Origins) -> String {
    let mut svg = String::new();
    let mut y = 0.0;
    let shares = origins.shares();
    let longest = shares.iter().map(|(_, share)| *share).fold(0.01, f64::max);
    for (origin, share) in shares {
        let length = BAR.1 * share / longest;
        text(&mut svg, 0.0, y + 13.0, origin.name());
        rect(&mut svg, origin.class(), (110.0, y), (length, 18.0));
        text(&mut svg, 116.0 + length, y + 13.0, &percent(share));
        y += 28.0;
    }
    chart("Output tokens by where they stood before", y, &svg)
}

/// How the speed-up grows with what is remembered.
pub(super) fn memory(points: &[MemoryPoint]) -> String {
    const HEIGHT: f64 = 150.0;
    let known: Vec<(f64, &MemoryPoint)> = points
        .iter()
        .filter_map(|point| Some((point.speedup?, point)))
        .collect();
    let most = known
        .iter()
        .map(|(speedup, _)| *speedup)
        .fold(1.0, f64::max);
    let y = |speedup: f64| 20.0 + HEIGHT * (1.0 - speedup / most);
    let apart = (WIDTH - 90.0) / known.len().saturating_sub(1).max(1) as f64;
    let x = |at: usize| 45.0 + apart * at as f64;
    let mut svg = String::new();
    line(&mut svg, "axis", (20.0, y(0.0)), (WIDTH - 20.0, y(0.0)));
    let path: Vec<String> = known
        .iter()
        .enumerate()
        .map(|(at, (speedup, _))| format!("{:.1},{:.1}", x(at), y(*speedup)))
        .collect();
    let _ = write!(
        svg,
        "<polyline class=\"curve\" points=\"{}\"/>",
        path.join(" ")
    );
    for (at, (speedup, point)) in known.iter().enumerate() {
        let _ = write!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\"/>",
            x(at),
            y(*speedup)
        );
        text(
            &mut svg,
            x(at) - 30.0,
            y(*speedup) - 8.0,
            &format!("{speedup:.2}x"),
        );
        text(&mut svg, x(at) - 22.0, y(0.0) + 17.0, &short(point.tokens));
    }
    text(&mut svg, 20.0, y(0.0) + 36.0, "output tokens remembered");
    chart("Speed-up by what is remembered", HEIGHT + 64.0, &svg)
}

/// A count of tokens that fits below a point.
fn short(count: u64) -> String {
    count_words(count)
        .replace(" thousand", "k")
        .replace(" million", "M")
}

fn chart(title: &str, height: f64, content: &str) -> String {
    format!(
        "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\">{content}</svg>\n"
    )
}

fn text(svg: &mut String, x: f64, y: f64, text: &str) {
    let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>");
}

fn rect(svg: &mut String, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
    let _ = write!(
        svg,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
    );
}

fn line(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = write!(
        svg,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}
