//! The calls of an engine that drafts on its devices, and verifies as many places of each request.

use refrain_speculation::draft::{ProposeParams, Scope};

use super::{Proposer, Requests, of_namespace};
use crate::device::DeviceCommand;
use crate::lengths::PaddedPart;
use crate::speculation::EngineRules;

/// Observations of a namespace before which the devices keep their default votes, and after which they get new ones.
const VOTES_AFTER: u64 = 2_048;

/// Where the devices find the drafts of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestPlace {
    /// The number of its namespace on the devices; `None` for a request without one.
    pub namespace: Option<u32>,
    /// Most draft tokens of one step by its own rules.
    pub draft_tokens_max: u32,
}

impl Proposer {
    /// Where the devices find the drafts of a request, which has begun; `None` if it is unknown, or if no text is on
    /// devices.
    pub fn place(&self, request: &str) -> Option<RequestPlace> {
        let device = self.device.as_ref()?;
        let requests = self.requests.lock();
        let request = requests.running.get(request)?;
        let namespace = request
            .namespace()
            .map(|namespace| device.number(namespace));
        Some(RequestPlace {
            namespace,
            draft_tokens_max: request.rules().max_spec_tokens.unwrap_or(u32::MAX),
        })
    }

    /// The changes of the texts on the devices, which the next step makes on all of them.
    pub fn device_commands(&self) -> Vec<DeviceCommand> {
        let Some(device) = &self.device else {
            return Vec::new();
        };
        let commands = device.take();
        if !commands.is_empty() {
            self.metrics.device_tokens.set(device.tokens() as i64);
        }
        commands
    }

    /// Takes into account that all devices carried out the commands of the oldest step that loaded texts.
    pub fn devices_have_loaded(&self) {
        if let Some(device) = &self.device {
            device.has_loaded();
        }
    }

    /// The worth of matches on the devices, by namespace number, for the namespaces of which enough was learnt since
    /// the last call: for the request's own text, its group and its namespace the odds that a single match of 0, 1
    /// and so on up to `depth` tokens is continued rightly.
    pub fn match_odds(&self, depth: u32) -> Vec<(u32, Vec<f32>)> {
        let Some(device) = &self.device else {
            return Vec::new();
        };
        let Requests {
            statistics, told, ..
        } = &mut *self.requests.lock();
        let mut news = Vec::new();
        for (namespace, statistics) in statistics.iter() {
            let Some(namespace) = namespace else { continue };
            let Some(number) = device.known_number(*namespace) else {
                continue;
            };
            let known = told.entry(*namespace).or_default();
            if statistics.observations() < *known + VOTES_AFTER {
                continue;
            }
            *known = statistics.observations();
            let scopes = [Scope::Request, Scope::Group, Scope::Tenant];
            let odds = scopes.into_iter().flat_map(|scope| {
                (0..=depth).map(move |match_len| statistics.match_odds(scope, match_len))
            });
            news.push((number, odds.collect()));
        }
        told.retain(|namespace, _| statistics.contains(&Some(*namespace)));
        news
    }

    /// The length of the drafts of a step, out of those that the engine has, and whether the guard holds drafts back.
    /// The requests are those that the step decodes for. Their drafts are judged by the text that is known here,
    /// which may be a step behind the devices'.
    pub fn length(&self, requests: &[String], lengths: &[u32]) -> (u32, bool) {
        let all = &mut *self.requests.lock();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let engine = EngineRules {
            is_padded: true,
            ..EngineRules::default()
        };
        let running = all.running.len();
        let mut drafts: Vec<Vec<f32>> = Vec::with_capacity(requests.len());
        let mut kv_tokens = 0;
        for id in requests {
            let Some(request) = all.running.get_mut(id) else {
                drafts.push(Vec::new());
                continue;
            };
            let params: ProposeParams = engine.params(&self.rules, request.rules(), running);
            let statistics = of_namespace(&mut all.statistics, request);
            drafts.push(request.prospect(&params, statistics, longest as usize, &self.metrics));
            kv_tokens += u64::from(request.standing().0);
        }
        match all.lengths.choose(&drafts, kv_tokens, lengths) {
            Some(length) => (length, false),
            None => (0, true),
        }
    }

    /// Takes a step into account that the engine made in so many seconds. `withheld` says that the guard held its
    /// drafts back. Tokens are told by [`extend`](Self::extend) as well.
    pub fn observe_step(&self, seconds: f64, parts: Vec<PaddedPart>, withheld: bool) {
        let Requests {
            running, lengths, ..
        } = &mut *self.requests.lock();
        for part in parts.iter().filter(|part| part.places > 0) {
            let accepted = part.emitted.saturating_sub(1).min(part.places);
            self.metrics.drafts.inc();
            self.metrics.drafted.inc_by(part.places.into());
            self.metrics.accepted.inc_by(accepted.into());
        }
        let parts = parts.into_iter().map(|part| {
            let standing = running.get(&part.request).map(|request| request.standing());
            let (text_tokens, expected) = standing.unwrap_or_default();
            (part, text_tokens, expected)
        });
        lengths.observe(seconds, withheld, parts);
    }
}
