//! The calls of the script that counts, and its answers.

use std::time::Duration;

use anyhow::Context as _;
use redis::Cmd;

use crate::tenants::file::LimitsEntry;
use crate::tenants::limit_usage::{PER_MINUTE, PerMinute, Refusal, Subject};

/// The script. Redis runs it as one step.
pub(super) const SCRIPT: &str = include_str!("script.lua");

/// A change of this number leaves earlier counts alone. It belongs to the form of what the script stores.
const FORM: u32 = 1;

/// The purpose of a call of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Counts a request, unless a limit is reached.
    Begin,
    /// Takes tokens, unless a limit is reached.
    Reserve,
    /// Takes or gives back what is left to settle, and ends the place.
    Settle,
}

/// A tenant or key in Redis.
#[derive(Clone, Debug)]
pub(super) struct CountedSubject {
    buckets_key: String,
    places_key: String,
    limits: LimitsEntry,
}

/// The amounts of a call, in the order of [`PER_MINUTE`].
pub(super) type Amounts = [f64; PER_MINUTE.len()];

/// Amounts by what they are of.
pub(super) fn amounts(amount: impl Fn(PerMinute) -> f64) -> Amounts {
    PER_MINUTE.map(|(of, _)| amount(of))
}

/// An answer of the script.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    /// The subject that has reached a limit, by its number, and which limit.
    pub(crate) refusal: Option<(usize, Refusal)>,
    /// For each subject, what is left of its limits.
    pub(crate) left: Vec<[Option<f64>; PER_MINUTE.len()]>,
}

impl CountedSubject {
    pub(super) fn new(prefix: &str, subject: &Subject, limits: LimitsEntry) -> Self {
        let (kind, name) = match subject {
            Subject::Tenant(name) => ("tenant", name),
            Subject::Key(id) => ("key", id),
        };
        let key = |what: &str| format!("{prefix}:limits{FORM}:{kind}:{name}:{what}");
        CountedSubject {
            buckets_key: key("buckets"),
            places_key: key("places"),
            limits,
        }
    }

    /// The key of the set of its requests in flight.
    pub(super) fn places_key(&self) -> &str {
        &self.places_key
    }
}

/// Makes a call. `script` is the command and the name or text of the script.
pub(super) fn call(
    script: [&str; 2],
    act: Act,
    place: &str,
    place_ms: u64,
    subjects: &[CountedSubject],
    amounts: &Amounts,
) -> Cmd {
    let [command, script] = script;
    let mut call = redis::cmd(command);
    call.arg(script).arg(2 * subjects.len());
    for subject in subjects {
        call.arg(&subject.buckets_key).arg(&subject.places_key);
    }
    let act = match act {
        Act::Begin => "begin",
        Act::Reserve => "reserve",
        Act::Settle => "settle",
    };
    call.arg(act).arg(place).arg(place_ms);
    for CountedSubject { limits, .. } in subjects {
        let mut numbers = Vec::with_capacity(8 * (1 + 2 * amounts.len()));
        let most = limits.requests_in_flight_max.unwrap_or(0);
        numbers.extend((most as f64).to_le_bytes());
        for ((of, _), amount) in PER_MINUTE.iter().zip(amounts) {
            let per_minute = of.limit(limits).unwrap_or(0) as f64;
            numbers.extend(per_minute.to_le_bytes());
            numbers.extend(amount.to_le_bytes());
        }
        call.arg(numbers);
    }
    call
}

/// Reads an answer, which is doubles.
///
/// # Errors
/// It has another form.
pub(super) fn parse(answer: &[u8], subjects: usize) -> anyhow::Result<Answer> {
    let (numbers, rest) = answer.as_chunks::<8>();
    let numbers: Vec<f64> = numbers.iter().map(|it| f64::from_le_bytes(*it)).collect();
    let of_subject = 1 + PER_MINUTE.len();
    let (refused, left) = numbers.split_at_checked(3).context("it is too short")?;
    anyhow::ensure!(
        rest.is_empty() && left.len() == subjects * of_subject,
        "it has {} bytes",
        answer.len()
    );
    let left = left.chunks_exact(of_subject);
    let [subject, bucket, wait_s] = [refused[0], refused[1], refused[2]];
    let refusal = match (subject as usize).checked_sub(1) {
        None => None,
        Some(subject) => {
            let in_flight = left.clone().nth(subject).context("an unknown subject")?[0];
            let refusal = match (bucket as usize).checked_sub(1) {
                None => Refusal::InFlight(in_flight as u64),
                Some(at) => {
                    anyhow::ensure!(at < PER_MINUTE.len(), "an unknown limit");
                    let wait = Duration::try_from_secs_f64(wait_s)?;
                    Refusal::PerMinute { at, wait }
                }
            };
            Some((subject, refusal))
        }
    };
    let level = |number: f64| (!number.is_nan()).then_some(number);
    let levels = left.map(|numbers| std::array::from_fn(|at| level(numbers[1 + at])));
    Ok(Answer {
        refusal,
        left: levels.collect(),
    })
}
