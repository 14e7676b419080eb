//! Engines that sources name: they get a worker while a source names them, and lose it when none does any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use refrain_service_kit::cluster_api::ClusterApi;
use refrain_service_kit::telemetry::Metrics;

use super::metrics::DiscoveryFamilies;
use crate::config::AdoptionConfig;
use crate::engine_source::EngineSource;

/// The sources of a process.
pub(super) struct Discovery {
    sources: Vec<(String, EngineSource)>,
    cluster: Option<ClusterApi>,
    families: DiscoveryFamilies,
    interval: Duration,
    absence: Duration,
}

impl Discovery {
    /// Reads the sources. `None` if there are none.
    ///
    /// # Errors
    /// A source cannot be read, or asks for a cluster of which this process is no part.
    pub(super) fn new(config: &AdoptionConfig, metrics: &Metrics) -> anyhow::Result<Option<Self>> {
        if config.sources.is_empty() {
            return Ok(None);
        }
        let read = |text: &String| anyhow::Ok((text.clone(), EngineSource::read(text)?));
        let sources = config.sources.iter().map(read);
        let sources = sources.collect::<anyhow::Result<Vec<_>>>()?;
        let cluster = cluster_of(config, sources.iter().map(|(_, source)| source))?;
        Ok(Some(Discovery {
            cluster,
            families: DiscoveryFamilies::register(metrics.registry())?,
            interval: Duration::from_millis(config.lookup_interval_ms),
            absence: Duration::from_millis(config.absence_ms_max),
            sources,
        }))
    }

    /// Looks the engines up again and again, for as long as `apply` takes the changes and returns true.
    pub(super) async fn run(&self, apply: impl Fn(Changes) -> bool) {
        let mut known = KnownEngines::default();
        let mut faults = BTreeMap::new();
        loop {
            let lookups = self.sources.iter().map(|(name, source)| async move {
                (name, source.look_up(self.cluster.as_ref()).await)
            });
            for (name, found) in join_all(lookups).await {
                self.show(name, &found, &mut faults);
                if let Ok(found) = found {
                    known.by_source.insert(name.clone(), found);
                }
            }
            if !apply(known.changes(self.absence, Instant::now())) {
                return;
            }
            tokio::time::sleep(self.interval).await;
        }
    }

    /// Counts what a source said, and logs a fault once.
    fn show(
        &self,
        name: &str,
        found: &anyhow::Result<BTreeSet<String>>,
        faults: &mut BTreeMap<String, String>,
    ) {
        match found {
            Ok(found) => {
                let engines = self.families.engines.with_label_values(&[name]);
                engines.set(found.len() as i64);
                if faults.remove(name).is_some() {
                    tracing::info!(source = name, "a source of engines answers again");
                }
            }
            Err(error) => {
                self.families.faults.with_label_values(&[name]).inc();
                let error = format!("{error:#}");
                if faults.insert(name.to_owned(), error.clone()) != Some(error.clone()) {
                    tracing::warn!(
                        source = name,
                        error,
                        "a source of engines cannot be read; its engines stay"
                    );
                }
            }
        }
    }
}

/// The API that some of the sources ask.
fn cluster_of<'a>(
    config: &AdoptionConfig,
    mut sources: impl Iterator<Item = &'a EngineSource>,
) -> anyhow::Result<Option<ClusterApi>> {
    let cluster = || match &config.cluster {
        Some((url, folder)) => ClusterApi::at(url.clone(), folder),
        None => ClusterApi::of_pod(),
    };
    let needs_cluster = sources.any(EngineSource::needs_cluster);
    needs_cluster.then(cluster).transpose()
}

/// Looks up once which engines a source of a configuration names.
///
/// # Errors
/// It cannot be asked, or what it says cannot be read.
pub async fn look_up(config: &AdoptionConfig, source: &str) -> anyhow::Result<BTreeSet<String>> {
    let source = EngineSource::read(source)?;
    let cluster = cluster_of(config, std::iter::once(&source))?;
    source.look_up(cluster.as_ref()).await
}

/// The last answers of the sources.
#[derive(Default)]
struct KnownEngines {
    /// A source that cannot be read says nothing new, so its engines stay.
    by_source: BTreeMap<String, BTreeSet<String>>,
    /// The engines that were named, and since when none names them.
    absent_since: BTreeMap<String, Option<Instant>>,
}

/// The engines that are to have a worker, and those that are not any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) present: Vec<String>,
    pub(super) gone: Vec<String>,
}

impl KnownEngines {
    /// Compares them with those before. An engine goes once it has been absent for `absence`, since answers of a name
    /// server may be incomplete for a moment.
    fn changes(&mut self, absence: Duration, now: Instant) -> Changes {
        let present: BTreeSet<_> = self.by_source.values().flatten().cloned().collect();
        for url in &present {
            self.absent_since.insert(url.clone(), None);
        }
        let mut gone = Vec::new();
        self.absent_since.retain(|url, since| {
            if present.contains(url) {
                return true;
            }
            let since = since.get_or_insert(now);
            let stays = now.duration_since(*since) < absence;
            if !stays {
                gone.push(url.clone());
            }
            stays
        });
        Changes {
            present: present.into_iter().collect(),
            gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_goes_when_no_source_has_named_it_for_a_while() {
        let (start, mut known) = (Instant::now(), KnownEngines::default());
        let mut round = |found: &[(&str, &[&str])], second: u64| {
            for (source, urls) in found {
                let urls = urls.iter().map(|url| (*url).to_owned()).collect();
                known.by_source.insert((*source).to_owned(), urls);
            }
            let changes =
                known.changes(Duration::from_secs(10), start + Duration::from_secs(second));
            (changes.present.join(" "), changes.gone.join(" "))
        };
        let is = |present: &str, gone: &str| (present.to_owned(), gone.to_owned());
        assert_eq!(
            round(&[("x", &["a", "b"]), ("y", &["b"])], 0),
            is("a b", "")
        );
        assert_eq!(round(&[("x", &[])], 1), is("b", ""));
        // It is back in time, so its absence begins anew.
        assert_eq!(round(&[("x", &["a"])], 10), is("a b", ""));
        assert_eq!(round(&[("x", &[])], 12), is("b", ""));
        assert_eq!(round(&[], 21), is("b", ""));
        assert_eq!(round(&[], 22), is("b", "a"));
        assert_eq!(round(&[], 23), is("b", ""));
    }
}
