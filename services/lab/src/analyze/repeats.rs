//! Where the repeated text of outputs stood before: in the call itself, in its session, or elsewhere.

use std::collections::{HashMap, HashSet};

use refrain_suffix_index::Token;
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::sample::TenantWorkload;

/// Tokens in a row that make a repeat. Shorter ones are mostly common phrases.
const REPEAT_TOKENS: usize = 6;
/// Tokens of a passage that is shown.
const PASSAGE_TOKENS: usize = 120;
/// Repeated tokens without which a passage is not shown.
const PASSAGE_REPEATED_MIN: usize = 24;

/// Where a token of an output stood before, within a repeat. The nearest place counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// In the prompt of the call, or earlier in its output.
    Call,
    /// In an earlier output of the session.
    Session,
    /// In another sample of the same group.
    Group,
    /// In an output of another session.
    Others,
    /// Nowhere: the token is new.
    New,
}

/// Output tokens by where they stood before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Origins {
    /// Share from the call itself.
    pub call: f64,
    /// Share from earlier outputs of the session.
    pub session: f64,
    /// Share from other samples of the group.
    pub group: f64,
    /// Share from other sessions.
    pub others: f64,
    /// Share that is new.
    pub new: f64,
}

/// A piece of an output, cut where the origin changes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Passage {
    /// The place for which it was chosen.
    pub(super) of: Origin,
    pub(super) parts: Vec<(Origin, Vec<Token>)>,
}

/// The repeats of a workload.
#[derive(Clone, Debug, Default)]
pub(super) struct Repeats {
    /// Output tokens by origin, in the order of [`Origin`].
    pub(super) tokens: [u64; 5],
    /// The passages with most tokens from the call, from its session or group, and from elsewhere.
    pub(super) passages: Vec<(usize, Passage)>,
}

impl Origins {
    /// The shares of these counts, which are in the order of [`Origin`].
    pub(super) fn of(tokens: [f64; 5]) -> Self {
        let all = tokens.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let [call, session, group, others, new] = tokens.map(|count| count / all);
        Origins {
            call,
            session,
            group,
            others,
            new,
        }
    }

    /// The shares with their origins.
    pub(super) fn shares(&self) -> [(Origin, f64); 5] {
        [
            (Origin::Call, self.call),
            (Origin::Session, self.session),
            (Origin::Group, self.group),
            (Origin::Others, self.others),
            (Origin::New, self.new),
        ]
    }

    /// The place from which most repeated text comes; `None` if nothing repeats.
    pub(super) fn most(&self) -> Option<Origin> {
        let repeated = self
            .shares()
            .into_iter()
            .take(4)
            .filter(|(_, share)| *share > 0.0);
        let most = repeated.reduce(|most, next| if next.1 > most.1 { next } else { most });
        most.map(|(origin, _)| origin)
    }
}

impl Origin {
    /// Its name in pictures.
    pub(super) fn name(self) -> &'static str {
        match self {
            Origin::Call => "the call itself",
            Origin::Session => "the session",
            Origin::Group => "the group",
            Origin::Others => "other sessions",
            Origin::New => "new text",
        }
    }

    /// Its class in the page.
    pub(super) fn class(self) -> &'static str {
        match self {
            Origin::Call => "call",
            Origin::Session => "session",
            Origin::Group => "group",
            Origin::Others => "others",
            Origin::New => "new",
        }
    }
}

/// Finds the repeats of all outputs, in order.
pub(super) fn repeats(workload: &TenantWorkload) -> Repeats {
    let mut found = Repeats::default();
    let mut sessions: HashMap<&str, HashSet<u64>> = HashMap::new();
    let mut groups: HashMap<&str, HashSet<u64>> = HashMap::new();
    let mut all: HashSet<u64> = HashSet::new();
    let none = HashSet::new();
    for call in &workload.calls {
        let [session, group] = [&call.session, &call.group].map(Option::as_deref);
        let nearest = [
            session.and_then(|name| sessions.get(name)).unwrap_or(&none),
            group.and_then(|name| groups.get(name)).unwrap_or(&none),
            &all,
        ];
        let grams: Vec<u64> = grams(&call.output).collect();
        let origins = origins(&call.prompt, &call.output, &grams, nearest);
        for origin in &origins {
            found.tokens[*origin as usize] += 1;
        }
        found.consider(&call.output, &origins);
        for (name, known) in [(session, &mut sessions), (group, &mut groups)] {
            if let Some(name) = name {
                known.entry(name).or_default().extend(&grams);
            }
        }
        all.extend(grams);
    }
    found
}

/// Hashes of all runs of [`REPEAT_TOKENS`] tokens.
fn grams(text: &[Token]) -> impl Iterator<Item = u64> {
    text.windows(REPEAT_TOKENS).map(|run| {
        let mut bytes = [0; 4 * REPEAT_TOKENS];
        for (to, token) in bytes.chunks_exact_mut(4).zip(run) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        xxh3_64_with_seed(&bytes, 0)
    })
}

/// The origin of each token of an output. `earlier` has the runs of the session, of the group and of all calls.
fn origins(
    prompt: &[Token],
    output: &[Token],
    runs: &[u64],
    earlier: [&HashSet<u64>; 3],
) -> Vec<Origin> {
    let mut own: HashSet<u64> = grams(prompt).collect();
    let mut origins = vec![Origin::New; output.len()];
    for (at, run) in runs.iter().enumerate() {
        // Runs that overlap this one are no earlier text.
        if let Some(ended) = at.checked_sub(REPEAT_TOKENS) {
            own.insert(runs[ended]);
        }
        let [session, group, all] = earlier.map(|known| known.contains(run));
        let origin = match () {
            () if own.contains(run) => Origin::Call,
            () if session => Origin::Session,
            () if group => Origin::Group,
            () if all => Origin::Others,
            () => continue,
        };
        for token in &mut origins[at..at + REPEAT_TOKENS] {
            *token = origin.min(*token);
        }
    }
    origins
}

impl Repeats {
    /// Keeps passages of this output that are better than those so far.
    fn consider(&mut self, output: &[Token], origins: &[Origin]) {
        for start in (0..output.len()).step_by(PASSAGE_TOKENS / 2) {
            let end = output.len().min(start + PASSAGE_TOKENS);
            let window = &origins[start..end];
            for of in [Origin::Call, Origin::Session, Origin::Group, Origin::Others] {
                let count = window.iter().filter(|origin| **origin == of).count();
                let place = self
                    .passages
                    .iter()
                    .position(|(_, passage)| passage.of == of);
                let best = place.map_or(PASSAGE_REPEATED_MIN - 1, |at| self.passages[at].0);
                if count <= best {
                    continue;
                }
                let parts = window.chunk_by(|a, b| a == b).scan(start, |at, run| {
                    let from = *at;
                    *at += run.len();
                    Some((run[0], output[from..*at].to_vec()))
                });
                let passage = (
                    count,
                    Passage {
                        of,
                        parts: parts.collect(),
                    },
                );
                match place {
                    Some(at) => self.passages[at] = passage,
                    None => self.passages.push(passage),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::RecordedCall;

    fn workload(calls: &[(&str, &[Token], Vec<Token>)]) -> TenantWorkload {
        let calls = calls.iter().map(|(session, prompt, output)| RecordedCall {
            session: Some((*session).to_owned()),
            prompt: prompt.to_vec(),
            output: output.clone(),
            ..RecordedCall::default()
        });
        TenantWorkload {
            calls: calls.collect(),
            ..TenantWorkload::default()
        }
    }

    #[test]
    fn the_nearest_place_of_a_repeat_counts() {
        let (a, b): (Vec<Token>, Vec<Token>) = ((0..40).collect(), (100..140).collect());
        let found = repeats(&workload(&[
            ("s", &[], a.clone()),
            // From the session, then new text.
            ("s", &[], [&a[..30], &[900, 901, 902]].concat()),
            // From the prompt, although the session has it as well.
            ("s", &a, a[..20].to_vec()),
            // From another session, and the second half from this very output.
            ("t", &[], [&a[..12], &a[..12]].concat()),
            ("t", &[], b),
            // Too short a run.
            ("t", &[], a[30..35].to_vec()),
        ]));
        assert_eq!(found.tokens, [20 + 12, 30, 0, 12, 40 + 3 + 40 + 5]);
        let origins = Origins::of(found.tokens.map(|count| count as f64));
        assert_eq!(origins.most(), Some(Origin::Call));
        assert!((origins.shares().iter().map(|(_, share)| share).sum::<f64>() - 1.0).abs() < 1e-9);
        // Only the passage of the session has enough repeated tokens.
        let [(30, passage)] = &found.passages[..] else {
            panic!("{:?}", found.passages)
        };
        assert_eq!(passage.of, Origin::Session);
        assert_eq!(passage.parts[1], (Origin::New, vec![900, 901, 902]));
    }

    #[test]
    fn samples_of_a_group_are_nearer_than_other_calls() {
        let mut workload =
            workload(&[("a", &[], (0..50).collect()), ("b", &[], (0..50).collect())]);
        for call in &mut workload.calls {
            call.group = Some("g".into());
        }
        assert_eq!(repeats(&workload).tokens, [0, 0, 50, 0, 50]);
        assert_eq!(Origins::of([0.0, 0.0, 0.0, 0.0, 7.0]).most(), None);
    }
}
