//! The part of each simulation that the page draws.

use super::course::Moment;
use super::mesh::Mesh;
use super::shape::Shape;

/// Columns of a picture of instances.
pub(super) const COLUMNS: usize = 160;
/// Rows of it; further instances are left out.
const ROWS_MAX: usize = 64;
/// Points of a curve.
const POINTS: usize = 400;

/// The drawing of a simulation.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) makespan_s: f64,
    /// For each instance, the busy share of its slots in each column.
    pub(super) busy: Vec<Vec<f64>>,
    /// Share of the requests that is not done, by time.
    pub(super) unfinished: Vec<(f64, f64)>,
    /// Share of all KV caches that running requests use, by time.
    pub(super) kv: Vec<(f64, f64)>,
}

impl Plot {
    pub(super) fn of(title: String, mesh: &Mesh<'_>, shape: &Shape, course: &[Moment]) -> Self {
        let mut finished: Vec<f64> = mesh.jobs.iter().filter_map(|job| job.finished_s).collect();
        finished.sort_by(f64::total_cmp);
        let makespan_s = finished.last().copied().unwrap_or(0.0).max(1e-9);
        let column_s = makespan_s / COLUMNS as f64;
        let busy = mesh.instances.iter().take(ROWS_MAX).map(|instance| {
            let mut columns = vec![0.0; COLUMNS];
            for span in &instance.counts.spans {
                let share = f64::from(span.requests) / shape.slots as f64;
                for (at, within_s) in span.columns(column_s, COLUMNS) {
                    columns[at] += share * within_s / column_s;
                }
            }
            columns
        });
        let every = finished.len().div_ceil(POINTS).max(1);
        let count = finished.len().max(1) as f64;
        let points = finished.iter().enumerate();
        let points = points.filter(|(nth, _)| nth % every == 0 || nth + 1 == finished.len());
        Plot {
            title,
            makespan_s,
            busy: busy.collect(),
            unfinished: points
                .map(|(nth, time_s)| (*time_s, 1.0 - (nth + 1) as f64 / count))
                .collect(),
            kv: (course.iter())
                .map(|moment| (moment.until * makespan_s, moment.kv_share))
                .collect(),
        }
    }
}
