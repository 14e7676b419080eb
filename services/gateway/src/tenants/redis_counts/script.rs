//! The calls of the script that counts, and its answers.

use std::time::Duration;

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
        call.arg(limits.requests_in_flight_max.unwrap_or(0));
        for ((of, _), amount) in PER_MINUTE.iter().zip(amounts) {
            call.arg(of.limit(limits).unwrap_or(0)).arg(amount);
        }
    }
    call
}

/// Reads an answer.
///
/// # Errors
/// It has another form.
pub(super) fn parse(answer: &str, subjects: usize) -> anyhow::Result<Answer> {
    let mut words = answer.split(' ');
    let mut word = || {
        words
            .next()
            .ok_or_else(|| anyhow::anyhow!("it is too short"))
    };
    let refused = word()?;
    let mut left = Vec::with_capacity(subjects);
    let mut in_flight = Vec::with_capacity(subjects);
    for _ in 0..subjects {
        in_flight.push(word()?.parse::<u64>()?);
        let mut levels = [None; PER_MINUTE.len()];
        for level in &mut levels {
            *level = match word()? {
                "-" => None,
                number => Some(number.parse::<f64>()?),
            };
        }
        left.push(levels);
    }
    let refusal = match refused {
        "-" => None,
        refused => {
            let parts: Vec<&str> = refused.split(',').collect();
            let [subject, bucket, wait_s] = parts[..] else {
                anyhow::bail!("the refusal has {} parts", parts.len());
            };
            let subject = subject.parse::<usize>()?.wrapping_sub(1);
            let in_flight = in_flight.get(subject);
            let in_flight = in_flight.ok_or_else(|| anyhow::anyhow!("an unknown subject"))?;
            let refusal = match bucket.parse::<usize>()? {
                0 => Refusal::InFlight(*in_flight),
                bucket => {
                    anyhow::ensure!(bucket <= PER_MINUTE.len(), "an unknown limit");
                    Refusal::PerMinute {
                        at: bucket - 1,
                        wait: Duration::try_from_secs_f64(wait_s.parse()?)?,
                    }
                }
            };
            Some((subject, refusal))
        }
    };
    Ok(Answer { refusal, left })
}
