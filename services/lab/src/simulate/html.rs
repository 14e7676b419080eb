//! The report as one self-contained page: tables, instances over time, and the tails as SVG.

use std::fmt::Write;

use anyhow::anyhow;
use plotters::prelude::*;

use super::plot::{COLUMNS, Plot};
use super::report::SimulateReport;
use crate::page::{self, Curve, draw_curves, escaped};

/// Renders the page.
///
/// # Errors
/// A picture that cannot be drawn.
pub(super) fn html(report: &SimulateReport) -> anyhow::Result<String> {
    let mut page = page::head("Refrain: simulated schedules", 76);
    let mut plots = report.plots.iter();
    for workload in &report.workloads {
        let _ = writeln!(page, "<h1>{}</h1>", escaped(&workload.name));
        page.push_str(&page::table(&SimulateReport::lines(workload)));
        let of_workload: Vec<&Plot> = plots.by_ref().take(workload.runs.len()).collect();
        for (caption, points) in OVER_TIME {
            let drawn = over_time(&of_workload, caption, points);
            page.push_str(&drawn.map_err(|error| anyhow!("{caption}: {error}"))?);
        }
        for plot in of_workload {
            let drawn = gantt(plot).map_err(|error| anyhow!("{}: {error}", plot.title))?;
            page.push_str(&drawn);
        }
    }
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// The points of a curve.
type Points = fn(&Plot) -> &[(f64, f64)];

/// The shares that are drawn over time.
const OVER_TIME: [(&str, Points); 2] = [
    ("Requests that are not done", |plot| &plot.unfinished),
    ("KV caches, used by running requests", |plot| &plot.kv),
];

/// A share over time, one curve for each simulation.
fn over_time(
    plots: &[&Plot],
    caption: &str,
    points: Points,
) -> Result<String, Box<dyn std::error::Error>> {
    let end_s = plots
        .iter()
        .map(|plot| plot.makespan_s)
        .fold(1e-9, f64::max);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (900, 360)).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..end_s, 0.0..1.0)?;
        chart
            .configure_mesh()
            .x_desc("seconds")
            .y_desc("share")
            .draw()?;
        let curves: Vec<Curve> = plots
            .iter()
            .map(|plot| Curve {
                name: plot.title.clone(),
                points: points(plot).to_vec(),
            })
            .collect();
        draw_curves(&mut chart, &curves, 0, SeriesLabelPosition::MiddleRight)?;
        area.present()?;
    }
    Ok(svg)
}

/// The instances over time: the darker, the more of the slots are busy.
fn gantt(plot: &Plot) -> Result<String, Box<dyn std::error::Error>> {
    let rows = plot.busy.len();
    let mut svg = String::new();
    {
        let height = 90 + 9 * rows as u32;
        let area = SVGBackend::with_string(&mut svg, (900, height)).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .caption(&plot.title, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..plot.makespan_s, 0.0..rows as f64)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc("seconds")
            .y_desc("instance")
            .draw()?;
        let column_s = plot.makespan_s / COLUMNS as f64;
        let busiest = plot.busy.iter().flatten().copied().fold(1e-9, f64::max);
        let cells = plot.busy.iter().enumerate().flat_map(|(row, columns)| {
            columns
                .iter()
                .enumerate()
                .filter(|(_, share)| **share > 0.0)
                .map(move |(at, share)| {
                    let corners = [
                        (at as f64 * column_s, row as f64 + 0.1),
                        ((at + 1) as f64 * column_s, row as f64 + 0.9),
                    ];
                    Rectangle::new(corners, BLUE.mix(0.1 + 0.9 * share / busiest).filled())
                })
        });
        chart.draw_series(cells)?;
        area.present()?;
    }
    Ok(svg)
}
