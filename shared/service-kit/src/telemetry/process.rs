//! The metrics of the process: what it uses of its machine, and how its actors do. They are read whenever metrics
//! are rendered.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use crate::{actors, build_info, tasks};

crate::metric_families! {
    /// The process by the names that all clients of Prometheus give to these values.
    #[derive(Clone)]
    pub(crate) struct ProcessMetrics {
        /// Total user and system CPU time spent in seconds.
        cpu_seconds: IntCounter = "process_cpu_seconds_total",
        /// Number of open file descriptors.
        open_fds: IntGauge = "process_open_fds",
        /// Maximum number of open file descriptors.
        max_fds: IntGauge = "process_max_fds",
        /// Virtual memory size in bytes.
        virtual_bytes: IntGauge = "process_virtual_memory_bytes",
        /// Resident memory size in bytes.
        resident_bytes: IntGauge = "process_resident_memory_bytes",
        /// Start time of the process since unix epoch in seconds.
        start_seconds: IntGauge = "process_start_time_seconds",
        /// Number of OS threads in the process.
        threads: IntGauge = "process_threads",
        /// Always 1. Its labels say which program runs.
        build_info: IntGaugeVec = "refrain_build_info" ["version", "commit"],
        /// Panics of the process, also of calls and of tasks that began anew. The log has the place of each.
        panics: IntCounter = "refrain_panics_total",
        /// Restarts of an actor after a panic, by its name.
        actor_restarts: IntCounterVec = "refrain_actor_restarts_total" ["actor"],
        /// Messages that wait in the mailbox of an actor, by its name.
        actor_mailbox: IntGaugeVec = "refrain_actor_mailbox" ["actor"],
    }
}

impl ProcessMetrics {
    /// Reads the present values. Those that cannot be read stay as they are.
    pub(super) fn update(&self) {
        let labels = [build_info::VERSION, build_info::commit()];
        self.build_info.with_label_values(&labels).set(1);
        let more = tasks::panics().saturating_sub(self.panics.get());
        self.panics.inc_by(more);
        actors::observe(|name, restarts, waiting| {
            let counter = self.actor_restarts.with_label_values(&[name]);
            counter.inc_by(restarts.saturating_sub(counter.get()));
            if let Some(waiting) = waiting {
                let gauge = self.actor_mailbox.with_label_values(&[name]);
                gauge.set(waiting as i64);
            }
        });
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            self.open_fds.set(open.count() as i64);
        }
        if let Some(max) = getrlimit(Resource::Nofile).current {
            self.max_fds.set(max as i64);
        }
        let stat = fs::read_to_string("/proc/self/stat").ok();
        let Some(stat) = stat.and_then(|text| Stat::parse(&text)) else {
            return;
        };
        let ticks_per_s = clock_ticks_per_second();
        let cpu_seconds = stat.cpu_ticks / ticks_per_s;
        // Another thread may have added the same seconds in between.
        let added = cpu_seconds.saturating_sub(self.cpu_seconds.get());
        self.cpu_seconds.inc_by(added);
        self.threads.set(stat.threads as i64);
        self.virtual_bytes.set(stat.virtual_bytes as i64);
        let resident_bytes = stat.resident_pages * page_size() as u64;
        self.resident_bytes.set(resident_bytes as i64);
        // The start does not change, and the file with the time of the boot is long on large machines.
        if self.start_seconds.get() == 0
            && let Some(boot_s) = fs::read_to_string("/proc/stat")
                .ok()
                .as_deref()
                .and_then(boot_s)
        {
            let start_s = boot_s + stat.start_ticks / ticks_per_s;
            self.start_seconds.set(start_s as i64);
        }
    }
}

/// The fields of `/proc/self/stat` that are shown.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    cpu_ticks: u64,
    threads: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The second field is the name of the process in brackets, which may contain blanks and brackets itself.
        let (_, fields) = text.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Stat {
            cpu_ticks: field(14)?.checked_add(field(15)?)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// The time of the boot in Unix seconds, out of the text of `/proc/stat`.
fn boot_s(text: &str) -> Option<u64> {
    let seconds = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    seconds.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_any_name() {
        let text = "7 (a b) c) S 1 7 7 0 -1 4194560 9 0 0 0 300 40 0 0 20 0 12 0 5000 900000 77 18446744073709551615";
        let expected = Stat {
            cpu_ticks: 340,
            threads: 12,
            start_ticks: 5_000,
            virtual_bytes: 900_000,
            resident_pages: 77,
        };
        assert_eq!(Stat::parse(text), Some(expected));
        for cut in ["", "7 (a", "7 (a) S 1 2", "7 (a) S x"] {
            assert_eq!(Stat::parse(cut), None, "{cut}");
        }
        assert_eq!(
            boot_s("cpu 1 2\nbtime 1700000000\nprocesses 3\n"),
            Some(1_700_000_000)
        );
        assert_eq!(boot_s("cpu 1 2\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_values_of_this_process_are_plausible() {
        let metrics = ProcessMetrics::register(&prometheus::Registry::new()).unwrap();
        let held: Vec<_> = (0..20)
            .map(|_| fs::File::open("/proc/self/stat").unwrap())
            .collect();
        metrics.update();
        assert!(metrics.open_fds.get() > held.len() as i64);
        assert!(metrics.max_fds.get() >= metrics.open_fds.get());
        assert!(metrics.threads.get() >= 1);
        assert!(metrics.resident_bytes.get() > 1 << 16);
        assert!(metrics.virtual_bytes.get() >= metrics.resident_bytes.get());
        let now_s = crate::clock::unix_s() as i64;
        let age_s = now_s - metrics.start_seconds.get();
        assert!((-5..86_400).contains(&age_s), "{age_s} s");
    }
}
