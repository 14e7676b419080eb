//! The load of an engine, read from its page of Prometheus metrics.

use super::streaming::StreamingLoad;

/// The metrics page of a kind of engine, and the series of its load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSeries {
    pub(super) path: &'static str,
    pub(super) running: &'static str,
    pub(super) waiting: &'static str,
    pub(super) kv_usage: Option<&'static str>,
    pub(super) kv_capacity: Option<CapacitySeries>,
    pub(super) prefill: Option<PrefillSeries>,
}

/// How a page tells the number of tokens in the KV cache.
#[derive(Clone, Copy, Debug)]
pub(super) enum CapacitySeries {
    /// As the value of a series.
    Tokens(&'static str),
    /// As two labels of a series: the number of blocks, and the tokens of each.
    Blocks {
        series: &'static str,
        blocks: &'static str,
        block_tokens: &'static str,
    },
    /// By the tokens in use, together with their share of the cache.
    Used(&'static str),
}

/// Totals from which the price of reading prompts follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillSeries {
    pub(super) seconds: &'static str,
    pub(super) tokens: &'static str,
    /// Tokens among them that were in the cache.
    pub(super) cached_tokens: Option<&'static str>,
}

impl LoadSeries {
    /// Reads the load from the engine's metrics page.
    pub(super) fn read(&self, page: &str) -> StreamingLoad {
        // Several engines behind one address are equally large in practice, so the mean tells their use.
        let kv_usage = self.kv_usage.and_then(|name| mean_of(page, name));
        StreamingLoad {
            running: sum_of(page, self.running),
            waiting: sum_of(page, self.waiting),
            kv_usage,
            kv_capacity: self.kv_capacity.and_then(|of| of.read(page, kv_usage)),
            prefill_ms_per_1k: self.prefill.and_then(|of| of.read(page)),
        }
    }
}

impl CapacitySeries {
    fn read(&self, page: &str, usage: Option<f64>) -> Option<f64> {
        match *self {
            CapacitySeries::Tokens(name) => sum_of(page, name),
            CapacitySeries::Blocks {
                series,
                blocks,
                block_tokens,
            } => {
                let engines = lines_of(page, series).filter_map(|(labels, _)| {
                    let number = |name| label(labels, name)?.parse::<f64>().ok();
                    Some(number(blocks)? * number(block_tokens)?)
                });
                engines.fold(None, |sum, tokens| Some(sum.unwrap_or(0.0) + tokens))
            }
            CapacitySeries::Used(name) => {
                let share = usage.filter(|share| *share > 0.0)?;
                Some((sum_of(page, name)? / share).round())
            }
        }
    }
}

impl PrefillSeries {
    /// Milliseconds for a thousand tokens; `None` before any were read.
    fn read(&self, page: &str) -> Option<f64> {
        let cached = self.cached_tokens.and_then(|name| sum_of(page, name));
        let tokens = sum_of(page, self.tokens)? - cached.unwrap_or(0.0);
        let ms = sum_of(page, self.seconds)? * 1e6;
        (tokens > 0.0).then(|| ms / tokens)
    }
}

/// The lines of a series: the labels of each, and its value.
fn lines_of<'a>(page: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once('}')?,
            None => ("", rest),
        };
        let value = value.strip_prefix(' ')?.trim().parse().ok()?;
        Some((labels, value))
    })
}

/// The value of a label. Values with quotes in them are not read.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut starts = labels.match_indices(name);
    starts.find_map(|(at, _)| {
        let is_whole = at == 0 || labels[..at].ends_with(',');
        let value = labels[at + name.len()..].strip_prefix("=\"")?;
        is_whole.then_some(value)?.split('"').next()
    })
}

/// The mean of a series over its labels.
fn mean_of(page: &str, name: &str) -> Option<f64> {
    let lines = lines_of(page, name).count();
    sum_of(page, name).map(|sum| sum / lines as f64)
}

/// The sum of a series over its labels.
fn sum_of(page: &str, name: &str) -> Option<f64> {
    let values = lines_of(page, name).map(|(_, value)| value);
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

    #[test]
    fn kv_caches_are_read_from_the_pages_of_engines() {
        use std::sync::Arc;

        use refrain_tokenization::testing::byte_level_files;

        use crate::engine::dialect::{Dialect, LlamaCpp, SgLang, Vllm};

        let read = |dialect: &dyn Dialect, page: &str| dialect.load().unwrap().read(page);
        let vllm = Vllm { model: "m".into() };
        let page = concat!(
            "# TYPE vllm:cache_config_info gauge\n",
            "vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\",",
            "num_gpu_blocks=\"1000\",num_gpu_blocks_override=\"None\"} 1.0\n",
            "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2.0\n",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n",
            "vllm:request_prefill_time_seconds_sum{engine=\"0\",model_name=\"m\"} 0.5\n",
            "vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 3000.0\n",
            "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 2000.0\n",
        );
        let report = read(&vllm, page).kv_report().unwrap();
        assert_eq!(report.capacity_tokens, 16_000);
        assert_eq!(report.running_tokens, 4_000);
        assert_eq!(report.prefill_ms_per_1k, Some(500.0));
        assert_eq!(report.held, None);
        // Two engines behind one address.
        let second = page.replace("engine=\"0\"", "engine=\"1\"");
        let second = second.replace(" 0.25", " 0.75");
        let both = read(&vllm, &format!("{page}{second}"));
        assert_eq!(both.kv_usage, Some(0.5));
        assert_eq!(both.kv_capacity, Some(32_000.0));

        let page = concat!(
            "sglang:num_running_reqs{model_name=\"m\"} 1.0\n",
            "sglang:token_usage{model_name=\"m\"} 0.5\n",
            "sglang:max_total_num_tokens{model_name=\"m\"} 65536.0\n",
        );
        let report = read(&SgLang, page).kv_report().unwrap();
        assert_eq!(report.capacity_tokens, 65_536);
        assert_eq!(report.running_tokens, 32_768);
        assert_eq!((report.prefill_ms_per_1k, report.held), (None, None));

        let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
        let llama = LlamaCpp::new(tokenizer, true);
        let page = "llamacpp:prompt_tokens_total 4000\nllamacpp:prompt_seconds_total 2\n";
        let load = read(&llama, page);
        assert_eq!(load.kv_report(), None);
        assert_eq!(load.prefill_ms_per_1k, Some(500.0));
        let older = "llamacpp:kv_cache_usage_ratio 0.125\nllamacpp:kv_cache_tokens 512\n";
        let report = read(&llama, older).kv_report().unwrap();
        assert_eq!(report.capacity_tokens, 4_096);
        assert_eq!(report.running_tokens, 512);
    }
}
