//! The parts of a page that reports share: its head, text in it, and the curves of its charts.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// A curve of a chart.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws curves in colours of their own, with points of `point_size` pixels, and a legend at `legend`.
///
/// # Errors
/// The chart cannot be drawn.
pub(crate) fn draw_curves<'b>(
    chart: &mut Chart<'b, 'b>,
    curves: &[Curve],
    point_size: u32,
    legend: SeriesLabelPosition,
) -> Result<(), Box<dyn std::error::Error>> {
    for (at, curve) in curves.iter().enumerate() {
        let color = Palette99::pick(at).to_rgba();
        let drawn = LineSeries::new(curve.points.iter().copied(), color.stroke_width(2))
            .point_size(point_size);
        chart
            .draw_series(drawn)?
            .label(curve.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], color.stroke_width(2)));
    }
    if !curves.is_empty() {
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .position(legend)
            .draw()?;
    }
    Ok(())
}

/// The page up to its body. `width_em` is the greatest width of the body. It is light or dark as the reader's screen
/// is; pictures with colours of their own stay light.
pub(crate) fn head(title: &str, width_em: u32) -> String {
    let style = include_str!("page.css");
    format!(
        r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}body {{ max-width: {width_em}em }}
</style>
</head>
<body>
"#
    )
}

/// A table whose first line is its head. It scrolls by itself where the window is narrow.
pub(crate) fn table(lines: &[Vec<String>]) -> String {
    let mut table = "<div class=\"scroll\" tabindex=\"0\"><table>\n".to_owned();
    for (at, line) in lines.iter().enumerate() {
        let tag = if at == 0 { "th" } else { "td" };
        let cells: Vec<String> = line
            .iter()
            .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)))
            .collect();
        table.push_str(&format!("<tr>{}</tr>\n", cells.concat()));
    }
    table.push_str("</table></div>\n");
    table
}

/// The text with the characters replaced that HTML gives a meaning.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}
