//! The picture of an experiment as SVG, and its page.

use std::fmt::Write;

use anyhow::anyhow;
use plotters::prelude::*;

use super::report::{Findings, PaperReport};
use crate::page::{self, Curve, draw_curves, escaped};

const SIZE: (u32, u32) = (860, 400);
/// Least width of a group of bars, so that its name has room.
const BARS_WIDTH: u32 = 150;

/// The picture: curves where rows have places, else bars.
///
/// # Errors
/// A picture that cannot be drawn.
pub(super) fn svg(report: &PaperReport) -> anyhow::Result<String> {
    let has_places = report.findings.rows.iter().any(|row| row.at.is_some());
    let drawn = match has_places {
        true => curves(report),
        false => bars(report),
    };
    drawn.map_err(|error| anyhow!("{}: {error}", report.name))
}

/// The page: claim, table, picture and note.
///
/// # Errors
/// As [`svg`].
pub(super) fn html(report: &PaperReport) -> anyhow::Result<String> {
    let mut page = page::head(report.title, 70);
    let PaperReport {
        title,
        paper,
        version,
        place,
        claim,
        data,
        ..
    } = report;
    let _ = writeln!(
        page,
        "<h1>{}</h1>\n<p>{}, {}, {}. The paper: {} Calls: {}.</p>",
        escaped(title),
        escaped(paper),
        escaped(version),
        escaped(place),
        escaped(claim),
        escaped(data)
    );
    page.push_str(&page::table(&report.lines()));
    page.push_str(&svg(report)?);
    let note = escaped(&report.findings.note);
    let _ = writeln!(page, "<p>{note}</p>");
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

/// The drawn columns: their places in the rows, and their names.
fn drawn(findings: &Findings) -> Vec<(usize, String)> {
    let columns = findings.columns.iter().enumerate();
    let drawn = columns.filter(|(_, column)| column.is_drawn);
    drawn
        .map(|(at, column)| match column.is_published {
            true => (at, format!("paper: {}", column.name)),
            false => (at, column.name.to_owned()),
        })
        .collect()
}

fn curves(report: &PaperReport) -> Result<String, Box<dyn std::error::Error>> {
    let findings = &report.findings;
    let columns = drawn(findings);
    let mut curves: Vec<Curve> = Vec::new();
    for (at, column) in &columns {
        for row in &findings.rows {
            let Some((x, cell)) = row.at.zip(row.cells[*at]) else {
                continue;
            };
            let name = match &row.kind {
                Some(kind) if columns.len() == 1 => kind.clone(),
                Some(kind) => format!("{kind}, {column}"),
                None => column.clone(),
            };
            let point = (x, cell.mean);
            match curves.iter_mut().find(|curve| curve.name == name) {
                Some(curve) => curve.points.push(point),
                None => curves.push(Curve {
                    name,
                    points: vec![point],
                }),
            }
        }
    }
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let x_max = points().map(|point| point.0).fold(1e-9, f64::max) * 1.02;
    let y_max = points().map(|point| point.1).fold(1e-9, f64::max) * 1.05;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .caption(report.title, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max)?;
        let (x, y) = findings.axes;
        chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
        draw_curves(&mut chart, &curves, 3, SeriesLabelPosition::LowerRight)?;
        area.present()?;
    }
    Ok(svg)
}

fn bars(report: &PaperReport) -> Result<String, Box<dyn std::error::Error>> {
    let findings = &report.findings;
    let columns = drawn(findings);
    let rows = &findings.rows;
    let cells = || {
        rows.iter()
            .flat_map(|row| row.cells.iter().zip(&findings.columns))
    };
    let y_max = cells()
        .filter(|(_, column)| column.is_drawn)
        .filter_map(|(cell, _)| Some(cell.as_ref()?.mean))
        .fold(1e-9, f64::max);
    let width = 0.8 / columns.len().max(1) as f64;
    let mut svg = String::new();
    {
        let size = (SIZE.0.max(BARS_WIDTH * rows.len() as u32), SIZE.1);
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .caption(report.title, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..rows.len() as f64, 0.0..y_max * 1.3)?;
        let name = |at: &f64| {
            let is_middle = (at.fract() - 0.5).abs() < 1e-6;
            let row = rows.get(*at as usize).filter(|_| is_middle);
            row.map_or_else(String::new, |row| row.name.clone())
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(2 * rows.len() + 1)
            .x_label_formatter(&name)
            .y_desc(findings.axes.1)
            .draw()?;
        for (nth, (at, column)) in columns.iter().enumerate() {
            let color = Palette99::pick(nth).to_rgba();
            let bars = rows.iter().enumerate().filter_map(|(row, of)| {
                let left = row as f64 + 0.1 + nth as f64 * width;
                let corners = [(left, 0.0), (left + width * 0.95, of.cells[*at]?.mean)];
                Some(Rectangle::new(corners, color.filled()))
            });
            chart
                .draw_series(bars)?
                .label(column.as_str())
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 4), (x + 12, y + 4)], color.filled())
                });
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .position(SeriesLabelPosition::UpperRight)
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}
