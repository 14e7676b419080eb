//! A reader of `/metrics`.

use std::collections::BTreeMap;

/// One reading of a process's metrics.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    samples: Vec<Sample>,
    kinds: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Scrape {
    /// Reads Prometheus's text format.
    ///
    /// # Panics
    /// A line is not valid.
    pub fn parse(text: &str) -> Self {
        let mut scrape = Scrape::default();
        for line in text.lines() {
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                if let Some((name, kind)) = kind.split_once(' ') {
                    scrape.kinds.insert(name.to_owned(), kind.to_owned());
                }
            } else if !line.starts_with('#') && !line.is_empty() {
                let sample = Sample::parse(line);
                scrape
                    .samples
                    .push(sample.unwrap_or_else(|| panic!("no sample of Prometheus: {line}")));
            }
        }
        scrape
    }

    /// The sum of the samples of `name` that have all of these labels, or 0 without samples.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let fits = |sample: &&Sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|have| have == value))
        };
        self.samples
            .iter()
            .filter(fits)
            .map(|sample| sample.value)
            .sum()
    }

    /// The names of all metrics, as in their `# TYPE` lines.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    /// The type of a metric: `counter`, `gauge` or `histogram`.
    pub fn kind(&self, name: &str) -> Option<&str> {
        self.kinds.get(name).map(String::as_str)
    }

    /// Draft tokens accepted from a scope.
    pub fn accepted_from(&self, scope: &str) -> f64 {
        self.sum("refrain_spec_accepted_tokens_total", &[("scope", scope)])
    }

    /// Memory of the process, bytes.
    ///
    /// # Errors
    /// It is not shown.
    pub fn resident_bytes(&self) -> anyhow::Result<f64> {
        let bytes = self.sum("process_resident_memory_bytes", &[]);
        anyhow::ensure!(bytes > 0.0, "no memory is shown");
        Ok(bytes)
    }

    /// Requests that a route answered, with any status.
    pub fn requests_to(&self, route: &str) -> f64 {
        self.sum("refrain_http_requests_total", &[("route", route)])
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let (head, value) = line.rsplit_once(' ')?;
        let (name, labels) = match head.split_once('{') {
            None => (head, BTreeMap::new()),
            Some((name, labels)) => (name, parse_labels(labels.strip_suffix('}')?)?),
        };
        Some(Sample {
            name: name.to_owned(),
            labels,
            value: value.parse().ok()?,
        })
    }
}

/// The labels of a sample. No label value of the mesh contains an escaped quote, so a quote ends a value.
fn parse_labels(mut text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"")?;
        let (value, rest) = rest.split_once('"')?;
        labels.insert(name.to_owned(), value.to_owned());
        text = rest.strip_prefix(',').unwrap_or(rest);
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_by_label() {
        let text = "# HELP a b\n# TYPE a counter\na{x=\"1\",y=\"{2}\"} 3\na{x=\"2\"} 4.5\nb 1e3\n";
        let scrape = Scrape::parse(text);
        assert_eq!(scrape.sum("a", &[]), 7.5);
        assert_eq!(scrape.sum("a", &[("y", "{2}")]), 3.0);
        assert_eq!(scrape.sum("b", &[]), 1000.0);
        assert_eq!(scrape.sum("c", &[]), 0.0);
        assert_eq!(
            (scrape.names().count(), scrape.kind("a")),
            (1, Some("counter"))
        );
    }
}
