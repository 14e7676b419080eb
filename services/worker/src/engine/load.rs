//! The load of an engine, read from its page of Prometheus metrics.

use super::streaming::StreamingLoad;

/// The metrics page of a kind of engine, and the series of its load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSeries {
    pub(super) path: &'static str,
    pub(super) running: &'static str,
    pub(super) waiting: &'static str,
    pub(super) kv_usage: Option<&'static str>,
}

impl LoadSeries {
    /// Reads the load from the engine's metrics page.
    pub(super) fn read(&self, page: &str) -> StreamingLoad {
        StreamingLoad {
            running: sum_of(page, self.running),
            waiting: sum_of(page, self.waiting),
            kv_usage: self.kv_usage.and_then(|name| sum_of(page, name)),
        }
    }
}

/// The sum of a series over its labels.
fn sum_of(page: &str, name: &str) -> Option<f64> {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = match rest.strip_prefix('{') {
            Some(labels) => labels.rsplit_once('}')?.1,
            None => rest,
        };
        value.strip_prefix(' ')?.trim().parse::<f64>().ok()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_over_their_labels() {
        let page = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\",model_name=\"a b\"} 2.0\n\
                     vllm:num_requests_running{engine=\"1\",model_name=\"a b\"} 3.0\nvllm:num_requests_running_other 9\nplain 1e-1\n";
        assert_eq!(sum_of(page, "vllm:num_requests_running"), Some(5.0));
        assert_eq!(sum_of(page, "plain"), Some(0.1));
        assert_eq!(sum_of(page, "missing"), None);
    }
}
