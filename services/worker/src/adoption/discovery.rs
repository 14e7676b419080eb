//! Engines that sources name: they get a worker while a source names them, and lose it when none does any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use parking_lot::Mutex;
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
    /// It outlives a panic, after which engines that went meanwhile would stay for ever.
    known: Mutex<KnownEngines>,
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
            known: Mutex::default(),
        }))
    }

    /// Looks the engines up again and again, and has the changes applied.
    pub(super) async fn run(&self, apply: impl Fn(Changes)) {
        let mut faults = BTreeMap::new();
        loop {
            let lookups = self.sources.iter().map(|(name, source)| async move {
                (name, source.look_up(self.cluster.as_ref()).await)
            });
            let readings = join_all(lookups).await.into_iter().map(|(name, found)| {
                self.show(name, &found, &mut faults);
                (name.as_str(), found.ok())
            });
            let readings: Vec<_> = readings.collect();
            let changes = self
                .known
                .lock()
                .changes(&readings, self.absence, Instant::now());
            apply(changes);
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

/// The engines that sources named, and when one did last.
#[derive(Default)]
struct KnownEngines(BTreeMap<String, Named>);

struct Named {
    source: String,
    last: Instant,
}

/// The engines that are to have a worker, and those that are not any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) present: Vec<String>,
    pub(super) gone: Vec<String>,
}

impl KnownEngines {
    /// Takes in what the sources say now; `None`: a source could not be read.
    ///
    /// An engine goes once it has been absent for `absence`, since answers of a name server may be incomplete for a
    /// moment. While the source that named it last cannot be read, it counts as named.
    fn changes(
        &mut self,
        readings: &[(&str, Option<BTreeSet<String>>)],
        absence: Duration,
        now: Instant,
    ) -> Changes {
        for (source, found) in readings {
            for url in found.iter().flatten() {
                let source = (*source).to_owned();
                self.0.insert(url.clone(), Named { source, last: now });
            }
        }
        let (mut present, mut gone) = (Vec::new(), Vec::new());
        self.0.retain(|url, named| {
            let mut failed = readings.iter().filter(|(_, found)| found.is_none());
            if failed.any(|(source, _)| named.source == *source) {
                named.last = now;
            }
            let stays = now.duration_since(named.last) < absence;
            if named.last == now {
                present.push(url.clone());
            } else if !stays {
                gone.push(url.clone());
            }
            stays
        });
        Changes { present, gone }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_goes_when_its_source_has_not_named_it_for_a_while() {
        let (start, mut known) = (Instant::now(), KnownEngines::default());
        let mut round = |found: &[(&str, Option<&[&str]>)], second: u64| {
            let readings: Vec<_> = found
                .iter()
                .map(|(source, urls)| {
                    let urls = urls.map(|urls| urls.iter().map(|url| (*url).to_owned()).collect());
                    (*source, urls)
                })
                .collect();
            let now = start + Duration::from_secs(second);
            let changes = known.changes(&readings, Duration::from_secs(10), now);
            (changes.present.join(" "), changes.gone.join(" "))
        };
        let is = |present: &str, gone: &str| (present.to_owned(), gone.to_owned());
        let y: (&str, Option<&[&str]>) = ("y", Some(&["b"]));
        assert_eq!(round(&[("x", Some(&["a", "b"])), y], 0), is("a b", ""));
        assert_eq!(round(&[("x", Some(&[])), y], 1), is("b", ""));
        // It is back in time, so its absence begins anew.
        assert_eq!(round(&[("x", Some(&["a"])), y], 9), is("a b", ""));
        assert_eq!(round(&[("x", Some(&[])), y], 12), is("b", ""));
        // A source that cannot be read changes nothing, and its absence begins anew after it.
        assert_eq!(round(&[("x", None), y], 18), is("a b", ""));
        assert_eq!(round(&[("x", Some(&[])), y], 27), is("b", ""));
        assert_eq!(round(&[("x", Some(&[])), y], 28), is("b", "a"));
        assert_eq!(round(&[("x", Some(&[])), ("y", None)], 60), is("b", ""));
    }
}
