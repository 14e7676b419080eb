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

/// The page up to its body. `width_em` is the greatest width of the body.
pub(crate) fn head(title: &str, width_em: u32) -> String {
    format!(
        r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: {width_em}em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }}
table {{ border-collapse: collapse; margin: 1em 0 }}
th, td {{ padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
svg {{ display: block; max-width: 100%; height: auto; margin: 1.5em 0 }}
</style>
</head>
<body>
"#
    )
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
