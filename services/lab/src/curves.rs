//! Curves of a chart, with a legend.

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
