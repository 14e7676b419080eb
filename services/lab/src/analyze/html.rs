//! The report as one self-contained page: tables, and plots as SVG.

use std::fmt::Write;

use anyhow::anyhow;
use plotters::prelude::*;

use super::report::{AnalyzeReport, WorkloadReport};
use crate::page::{self, Curve, draw_curves, escaped};
use crate::replay::Policy;

/// Curves of one plot; more would be hard to distinguish.
const CURVES_MAX: usize = 9;
const SIZE: (u32, u32) = (760, 340);

/// Renders the page.
///
/// # Errors
/// A plot that cannot be drawn.
pub fn html(report: &AnalyzeReport) -> anyhow::Result<String> {
    let settings = &report.settings;
    let first = settings.concurrency[0];
    let mut page = page::head("Refrain: would drafting help?", 60);
    let _ = writeln!(
        page,
        "<h1>Would drafting help?</h1>\n<p>Recorded calls were replayed on a modelled engine, from an empty memory. \
         {}</p>",
        escaped(&settings.assumptions())
    );
    page.push_str(&table(&report.lines()));
    page.push_str("<h2>Alpha</h2>\n");
    page.push_str(&table(&report.alpha_lines()));
    if report.rows.len() > CURVES_MAX {
        let _ = writeln!(
            page,
            "<p>The plots show the first {CURVES_MAX} of {} rows.</p>",
            report.rows.len()
        );
    }
    let of_rows = |points: &dyn Fn(&WorkloadReport) -> Vec<(f64, f64)>| -> Vec<Curve> {
        let curves = report.rows.iter().map(|row| Curve {
            name: row.name.clone(),
            points: points(row),
        });
        curves.take(CURVES_MAX).collect()
    };
    let plots = [
        (
            "Speed-up by requests at once",
            "requests at once",
            "speed-up",
            of_rows(&|row| {
                let at = settings.concurrency.iter();
                at.filter_map(|&at| Some((at as f64, row.speedup(Policy::Goodput, at)?)))
                    .collect()
            }),
        ),
        (
            "Tokens per step as the memory grows",
            "calls",
            "tokens per step",
            of_rows(&|row| {
                let windows = row.windows.iter();
                windows
                    .filter_map(|window| Some((window.docs as f64, window.tokens_per_step?)))
                    .collect()
            }),
        ),
        (
            "Goodput by alpha, relative to auto, at the first number of requests",
            "alpha",
            "share of auto",
            of_rows(&|row| {
                let tried = row.alphas.first().into_iter().flat_map(|choice| {
                    choice.fixed.iter().filter_map(|fixed| {
                        let share = fixed.goodput_tokens_per_s? / choice.auto_tokens_per_s?;
                        Some((f64::from(fixed.alpha), share))
                    })
                });
                tried.collect()
            }),
        ),
        (
            "Share of drafted tokens that were accepted, by their expected probability",
            "expected",
            "accepted",
            of_rows(&|row| {
                let wanted = (Policy::Goodput, first);
                let mut rows = row.policies.iter();
                let found = rows.find(|row| (row.policy, row.concurrency) == wanted);
                let cells = found.into_iter().flat_map(|row| &row.reliability);
                cells.map(|cell| (cell.expected, cell.accepted)).collect()
            }),
        ),
    ];
    for (caption, x, y, curves) in &plots {
        page.push_str(&plot(caption, x, y, curves).map_err(|error| anyhow!("{caption}: {error}"))?);
    }
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// A table whose first line is its head.
fn table(lines: &[Vec<String>]) -> String {
    let mut table = "<table>\n".to_owned();
    for (at, line) in lines.iter().enumerate() {
        let tag = if at == 0 { "th" } else { "td" };
        table.push_str("<tr>");
        for cell in line {
            let _ = write!(table, "<{tag}>{}</{tag}>", escaped(cell));
        }
        table.push_str("</tr>\n");
    }
    table.push_str("</table>\n");
    table
}

fn plot(
    caption: &str,
    x: &str,
    y: &str,
    curves: &[Curve],
) -> Result<String, Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let x_max = points().map(|point| point.0).fold(1.0, f64::max);
    let y_max = points().map(|point| point.1).fold(1.0, f64::max) * 1.05;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max)?;
        chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
        draw_curves(&mut chart, curves, 3, SeriesLabelPosition::LowerRight)?;
        area.present()?;
    }
    Ok(svg)
}
