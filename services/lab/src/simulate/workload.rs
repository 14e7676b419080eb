//! The requests of a simulation.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::ensure;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::SessionHash;

use super::lengths::LengthModel;
use super::options::SimulateOptions;
use super::random::Random;
use super::shape::Shape;
use crate::logs::RecordedCall;

/// Streams of random numbers.
const LENGTHS: u64 = 1;
const SHUFFLED: u64 = 2;
const ARRIVALS: u64 = 4;

/// A request.
#[derive(Clone, Debug, Default)]
pub(super) struct Job {
    /// Number of its group.
    pub(super) group: usize,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    /// The longest output that an earlier run had for the same prompt.
    pub(super) expected_tokens: Option<u32>,
    /// The recorded call.
    pub(super) text: Option<Arc<RecordedCall>>,
    /// The turn of a conversation; `None` for a sample of a group.
    pub(super) turn: Option<Turn>,
}

/// A turn of a conversation.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    /// Its conversation, if the scheduler is told.
    pub(super) session: Option<SessionHash>,
    /// The turn after it, and the pause before that one.
    pub(super) next: Option<(usize, f64)>,
    /// Hashes of its prompt's prefixes.
    pub(super) before: Vec<PrefixHash>,
    /// Hashes of the prefixes of prompt and output.
    pub(super) after: Vec<PrefixHash>,
}

/// All requests, in order of arrival.
#[derive(Clone, Debug, Default)]
pub(super) struct Workload {
    pub(super) name: String,
    pub(super) jobs: Vec<Job>,
    pub(super) groups: usize,
    /// The limit of all outputs, tokens.
    pub(super) output_max: u32,
    /// Samples of the earlier run, for each group.
    pub(super) known: Vec<Known>,
}

/// The traces that an earlier run left of a group.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    pub(super) samples: usize,
    pub(super) longest: Option<u32>,
    pub(super) texts: Vec<Arc<RecordedCall>>,
}

impl Workload {
    /// Draws the lengths of all requests.
    pub(super) fn drawn(name: String, shape: &Shape, options: &SimulateOptions) -> Self {
        let model = LengthModel {
            mean: shape.output_mean,
            max: shape.output_max,
            sigma: options.length_sigma,
            correlation: options.group_correlation,
        };
        let location = model.location();
        let known_samples = (shape.group_size as f64 * options.history).round() as usize;
        let mut workload = Workload {
            name,
            groups: shape.groups,
            output_max: shape.output_max,
            ..Workload::default()
        };
        for group in 0..shape.groups {
            let stream = LENGTHS + ((group as u64 + 1) << 8);
            let mut random = Random::new(options.seed, stream);
            let mut lengths = model.group(location, shape.group_size + known_samples, &mut random);
            let of_known = lengths.split_off(shape.group_size);
            workload.known.push(Known {
                samples: known_samples,
                longest: of_known.into_iter().max(),
                texts: Vec::new(),
            });
            workload
                .jobs
                .extend(lengths.into_iter().map(|output_tokens| Job {
                    group,
                    prompt_tokens: options.prompt_tokens.max(1),
                    output_tokens,
                    ..Job::default()
                }));
        }
        workload.settled(options)
    }

    /// The recorded samples. The first ones of each group are the earlier run's, if there is one.
    pub(super) fn recorded(
        name: String,
        calls: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        options: &SimulateOptions,
    ) -> anyhow::Result<Self> {
        let mut numbers: HashMap<(Option<String>, String), usize> = HashMap::new();
        let mut groups: Vec<Vec<Arc<RecordedCall>>> = Vec::new();
        for call in calls {
            let call = call?;
            if call.output.is_empty() {
                continue;
            }
            let key = call.group.clone().map(|group| (call.tenant.clone(), group));
            let next = groups.len();
            let number = key.map_or(next, |key| *numbers.entry(key).or_insert(next));
            if number == next {
                groups.push(Vec::new());
            }
            groups[number].push(Arc::new(call));
        }
        ensure!(
            !groups.is_empty(),
            "{name}: there is no call with an output"
        );
        let scaled = |call: &RecordedCall| {
            let tokens = (call.output.len() as f64 * options.scale).round();
            (tokens as u32).max(1)
        };
        let mut workload = Workload {
            name,
            groups: groups.len(),
            ..Workload::default()
        };
        for (group, mut calls) in groups.into_iter().enumerate() {
            let known_samples = (calls.len() as f64 * options.history).floor() as usize;
            let texts: Vec<_> = calls.drain(..known_samples).collect();
            workload.known.push(Known {
                samples: known_samples,
                longest: texts.iter().map(|call| scaled(call)).max(),
                texts,
            });
            workload.jobs.extend(calls.into_iter().map(|call| Job {
                group,
                prompt_tokens: (call.prompt.len() as u32).max(1),
                output_tokens: scaled(&call),
                text: (options.scale == 1.0).then(|| call.clone()),
                ..Job::default()
            }));
        }
        let longest = workload.jobs.iter().map(|job| job.output_tokens).max();
        workload.output_max = options.output_max.unwrap_or(0).max(longest.unwrap_or(1));
        Ok(workload.settled(options))
    }

    /// Shuffles if that is wanted, and tells each request what the earlier run says of its group.
    fn settled(mut self, options: &SimulateOptions) -> Self {
        if options.shuffle_groups {
            let mut groups: Vec<usize> = self.jobs.iter().map(|job| job.group).collect();
            Random::new(options.seed, SHUFFLED).shuffle(&mut groups);
            for (job, group) in self.jobs.iter_mut().zip(groups) {
                job.group = group;
            }
            // Samples of a group still arrive one after the other.
            self.jobs.sort_by_key(|job| job.group);
        }
        if options.shuffle_order {
            let mut order: Vec<usize> = (0..self.groups).collect();
            Random::new(options.seed, ARRIVALS).shuffle(&mut order);
            let mut known = vec![Known::default(); self.groups];
            for (group, of) in self.known.drain(..).enumerate() {
                known[order[group]] = of;
            }
            self.known = known;
            for job in &mut self.jobs {
                job.group = order[job.group];
            }
            self.jobs.sort_by_key(|job| job.group);
        }
        for job in &mut self.jobs {
            job.expected_tokens = self.known[job.group].longest;
        }
        self
    }

    pub(super) fn output_tokens(&self) -> u64 {
        self.jobs
            .iter()
            .map(|job| u64::from(job.output_tokens))
            .sum()
    }
}
