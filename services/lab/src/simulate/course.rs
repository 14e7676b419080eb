//! A simulation over time: how full its instances are, and what drafts bring them.

use serde::Serialize;

use super::instance::Instance;

/// Parts into which the makespan is divided.
const MOMENTS: usize = 20;

/// A twentieth of the makespan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moment {
    /// Its end, as a share of the makespan.
    pub until: f64,
    /// Requests in the batch of an instance, mean.
    pub running: f64,
    /// Share of the KV caches that these requests use.
    pub kv_share: f64,
    /// Accepted draft tokens of a request in a step.
    pub accepted_per_step: f64,
}

/// The moments of a simulation.
pub(super) fn course(instances: &[Instance], makespan_s: f64) -> Vec<Moment> {
    let column_s = makespan_s.max(1e-9) / MOMENTS as f64;
    let mut sums = [Sums::default(); MOMENTS];
    for instance in instances {
        let blocks = instance.blocks().max(1) as f64;
        for span in &instance.counts.spans {
            let span_s = (span.end_s - span.start_s).max(1e-12);
            for (at, within_s) in span.columns(column_s, MOMENTS) {
                let sum = &mut sums[at];
                sum.requests_s += f64::from(span.requests) * within_s;
                sum.kv_s += span.blocks as f64 / blocks * within_s;
                sum.request_steps += span.request_steps * within_s / span_s;
                sum.tokens += span.decoded_tokens * within_s / span_s;
            }
        }
    }
    let whole_s = column_s * instances.len().max(1) as f64;
    let moment = |(nth, sum): (usize, &Sums)| Moment {
        until: (nth + 1) as f64 / MOMENTS as f64,
        running: sum.requests_s / whole_s,
        kv_share: sum.kv_s / whole_s,
        accepted_per_step: (sum.tokens / sum.request_steps.max(1e-9) - 1.0).max(0.0),
    };
    sums.iter().enumerate().map(moment).collect()
}

#[derive(Clone, Copy, Default)]
struct Sums {
    requests_s: f64,
    kv_s: f64,
    request_steps: f64,
    tokens: f64,
}

impl Moment {
    /// The means of the courses of several seeds.
    pub(super) fn means<'a>(courses: impl Iterator<Item = &'a [Moment]>) -> Vec<Moment> {
        let courses: Vec<&[Moment]> = courses.collect();
        let count = courses.len().max(1) as f64;
        let mean = |nth: usize| {
            let of = |value: fn(&Moment) -> f64| {
                let values = courses.iter().filter_map(|course| course.get(nth));
                values.map(value).sum::<f64>() / count
            };
            Moment {
                until: of(|moment| moment.until),
                running: of(|moment| moment.running),
                kv_share: of(|moment| moment.kv_share),
                accepted_per_step: of(|moment| moment.accepted_per_step),
            }
        };
        let moments = courses.iter().map(|course| course.len()).min();
        (0..moments.unwrap_or(0)).map(mean).collect()
    }
}
