//! Names, ids and times of a record: who called, for what, in which session, and when.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use xxhash_rust::xxh3::xxh3_64;

use super::call::RecordedCall;
use super::members::{Object, has_word, is_named, plain_name, words};

/// Names of ids of sessions, the surest first.
const SESSIONS: &str = "sessionid sessionidentifier session conversationid threadid chatid \
    promptcachekey instanceid trajectoryid rolloutid taskid traceid rootrunid parentrunid \
    heliconesessionid conversation runid";
/// Names of tenants: those for whom the caller works.
const TENANTS: &str = "tenant tenantid organizationid organization orgid teamalias teamid \
    customerid customer userapikeyalias apikeyalias userapikeyhash apikey projectid";
/// Names of end users. They share what a tenant remembers, so they are no tenants.
const USERS: &str = "userid user";
const WORKLOADS: &str = "workload workflow feature application app agentname promptname \
    requesttags tags usecase endpoint name dataset";
const GROUPS: &str = "group groupid groupindex";
const MODELS: &str = "model modelname responsemodel requestmodel modelid modelversion \
    providedmodelname";
const BEGINS: &str = "starttime starttimeunixnano startedat requeststarttime requestcreatedat \
    begin timestamp createdat created createtime time date ts timeunixnano datetime createdms";
const ENDS: &str = "endtime endtimeunixnano finishedat endedat completedat responsecreatedat \
    completiontime end";
const DURATIONS: &str = "durationms latencyms delayms requestdurationms responsetimems";
/// Times of the first token, since 1970 and since the call began. Tools differ in the unit of a `timeToFirstToken`.
const FIRSTS: &str = "completionstarttime firsttokentime firsttokenat";
const FIRST_DURATIONS: &str = "firstms timetofirsttokenms ttftms";

/// Which field of [`Names`] a name fills.
#[derive(Clone, Copy)]
enum Field {
    Session,
    Tenant,
    User,
    Workload,
    Group,
    Model,
    Begin,
    End,
    Duration,
    First,
    FirstDuration,
}

/// All names, with their place in the list of their field.
static KNOWN: LazyLock<HashMap<&str, (Field, usize)>> = LazyLock::new(|| {
    let lists = [
        (Field::Session, SESSIONS),
        (Field::Tenant, TENANTS),
        (Field::User, USERS),
        (Field::Workload, WORKLOADS),
        (Field::Group, GROUPS),
        (Field::Model, MODELS),
        (Field::Begin, BEGINS),
        (Field::End, ENDS),
        (Field::Duration, DURATIONS),
        (Field::First, FIRSTS),
        (Field::FirstDuration, FIRST_DURATIONS),
    ];
    let places = lists.into_iter().flat_map(|(field, names)| {
        words(names)
            .enumerate()
            .map(move |(at, name)| (name, (field, at)))
    });
    places.collect()
});

/// Members that hold texts, tools or counts, and no names of the call.
const TEXTS: &str = "input inputs output outputs prompt arguments tools usage message \
    responseformat toolusemetadata";

const DEPTH_MAX: usize = 4;

/// More than the names of any field.
const PLACES_MAX: usize = 100;

/// Names longer than this are texts.
const NAME_BYTES_MAX: usize = 200;

/// The names that the members of a record give a call. A member that stands nearer to the top counts more.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// For each field the place in its list of names, the depth, and the value.
    session: Option<(usize, String)>,
    tenant: Option<(usize, String)>,
    workload: Option<(usize, String)>,
    group: Option<(usize, String)>,
    model: Option<(usize, String)>,
    begin_ms: Option<(usize, u64)>,
    end_ms: Option<(usize, u64)>,
    duration_ms: Option<(usize, u64)>,
    first_at_ms: Option<(usize, u64)>,
    first_ms: Option<(usize, u64)>,
}

impl Names {
    /// The names in a record. The record is in another one that has the names `outer`.
    pub(super) fn of(record: &Object, outer: &Names) -> Names {
        let mut own = Names::default();
        own.read(record, "", 0);
        own.beside(outer)
    }

    /// These names, and those of `outer` that are missing here. A trace's session holds for its calls, which may have
    /// no better id than that of the trace.
    pub(super) fn beside(&self, outer: &Names) -> Names {
        fn or<T: Clone>(own: &Option<T>, outer: &Option<T>) -> Option<T> {
            own.clone().or_else(|| outer.clone())
        }
        let is_surer = match (&self.session, &outer.session) {
            (Some((own, _)), Some((outer, _))) => outer < own,
            (own, _) => own.is_none(),
        };
        Names {
            session: if is_surer {
                &outer.session
            } else {
                &self.session
            }
            .clone(),
            tenant: or(&self.tenant, &outer.tenant),
            workload: or(&self.workload, &outer.workload),
            group: or(&self.group, &outer.group),
            model: or(&self.model, &outer.model),
            begin_ms: or(&self.begin_ms, &outer.begin_ms),
            end_ms: self.end_ms,
            duration_ms: self.duration_ms,
            first_at_ms: self.first_at_ms,
            first_ms: self.first_ms,
        }
    }

    /// `name` is that of the object in the one around it.
    fn read(&mut self, object: &Object, name: &str, depth: usize) {
        let is_traced = object.keys().any(|key| is_named(key, "traceid"));
        for (key, value) in object {
            // `user.id` may be an object with an id.
            let key = plain_name(key);
            let joined = format!("{name}{key}");
            let is_known = depth > 0 && self.read_member(&joined, value, depth, is_traced);
            if !is_known {
                self.read_member(&key, value, depth, is_traced);
            }
        }
        if depth < DEPTH_MAX {
            for (key, value) in object {
                if let Value::Object(inner) = value {
                    let key = plain_name(key);
                    if !has_word(TEXTS, &key) {
                        self.read(inner, &key, depth + 1);
                    }
                }
            }
        }
    }

    /// Reads a member by its plain name. Returns whether the name is a known one.
    fn read_member(&mut self, key: &str, value: &Value, depth: usize, is_traced: bool) -> bool {
        let Some((field, at)) = KNOWN.get(key) else {
            return false;
        };
        let at = *at;
        let value = match value {
            // The first of several tags.
            Value::Array(list) => list.first().unwrap_or(value),
            // LiteLLM writes them as a text.
            Value::String(text) if text.starts_with("[\"") => &first_tag(text).unwrap_or_default(),
            value => value,
        };
        // Ids and names are short, and so are times.
        let text = match value {
            Value::String(text) if !text.is_empty() && text.len() <= NAME_BYTES_MAX => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => return false,
        };
        match *field {
            Field::Session => set(&mut self.session, at, text),
            Field::Tenant if key == "apikey" => {
                let digest = xxh3_64(text.as_bytes()) >> 32;
                set(&mut self.tenant, at, format!("key-{digest:08x}"));
            }
            Field::Tenant => set(&mut self.tenant, at, text),
            // Anthropic's clients write an id of a session into the id of a user.
            Field::User => match text.rsplit_once("_session_") {
                Some((_, session)) => set(&mut self.session, 0, session.to_owned()),
                None => return false,
            },
            // Other things than calls have names as well.
            Field::Workload if key == "name" && (depth > 0 || !is_traced) => return false,
            Field::Workload => set(&mut self.workload, at, text),
            Field::Group => set(&mut self.group, at, text),
            Field::Model => set(&mut self.model, at, text),
            Field::Begin => set_some(&mut self.begin_ms, at + depth * PLACES_MAX, unix_ms(value)),
            Field::End => set_some(&mut self.end_ms, at + depth * PLACES_MAX, unix_ms(value)),
            Field::First => set_some(&mut self.first_at_ms, at, unix_ms(value)),
            Field::Duration => set_some(&mut self.duration_ms, at, whole_ms(value)),
            Field::FirstDuration => set_some(&mut self.first_ms, at, whole_ms(value)),
        }
        true
    }

    pub(super) fn with_session(mut self, session: impl FnOnce() -> String) -> Names {
        self.session.get_or_insert_with(|| (PLACES_MAX, session()));
        self
    }

    pub(super) fn session(&self) -> Option<&str> {
        self.session.as_ref().map(|(_, session)| session.as_str())
    }

    /// Everything of a call but its texts.
    pub(super) fn head(&self) -> RecordedCall {
        let at_ms = self.begin_ms.as_ref().map(|(_, ms)| *ms);
        let lasted = |ms: Option<(usize, u64)>, end: Option<(usize, u64)>| {
            let until_end = || end?.1.checked_sub(at_ms?);
            ms.map(|(_, ms)| ms).or_else(until_end)
        };
        RecordedCall {
            workload: value(&self.workload),
            group: value(&self.group),
            tenant: value(&self.tenant),
            session: value(&self.session),
            model: value(&self.model),
            at_ms,
            duration_ms: lasted(self.duration_ms, self.end_ms),
            first_ms: lasted(self.first_ms, self.first_at_ms),
            ..RecordedCall::default()
        }
    }
}

fn value(of: &Option<(usize, String)>) -> Option<String> {
    of.as_ref().map(|(_, value)| value.clone())
}

fn set_some<T>(field: &mut Option<(usize, T)>, place: usize, value: Option<T>) {
    if let Some(value) = value {
        set(field, place, value);
    }
}

fn whole_ms(value: &Value) -> Option<u64> {
    value.as_f64().map(|ms| ms.max(0.0) as u64)
}

/// The first of tags that are a text of JSON.
fn first_tag(text: &str) -> Option<Value> {
    let tags: Vec<Value> = serde_json::from_str(text).ok()?;
    tags.into_iter().next()
}

/// Sets a field, unless a better name has set it.
fn set<T>(field: &mut Option<(usize, T)>, place: usize, value: T) {
    if field.as_ref().is_none_or(|(set, _)| place < *set) {
        *field = Some((place, value));
    }
}

/// Milliseconds since 1970 of a time in ISO 8601, or of a number of seconds, milliseconds, microseconds or
/// nanoseconds.
fn unix_ms(value: &Value) -> Option<u64> {
    let number = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => match text.parse::<f64>() {
            Ok(number) => number,
            Err(_) => return iso_ms(text),
        },
        _ => return None,
    };
    // From 2001 to 5138 the number of digits tells the unit.
    let ms = match number {
        1e9..1e11 => number * 1e3,
        1e11..1e14 => number,
        1e14..1e17 => number / 1e3,
        1e17..1e20 => number / 1e6,
        _ => return None,
    };
    Some(ms as u64)
}

fn iso_ms(text: &str) -> Option<u64> {
    let text = text.trim().replacen([' ', ','], "T", 1).replace(',', ".");
    let parse = |text: &str| OffsetDateTime::parse(text, &Rfc3339).ok();
    let time = parse(&text)
        // A time without a zone, and one with a zone of four digits.
        .or_else(|| parse(&format!("{text}Z")))
        .or_else(|| {
            parse(&format!(
                "{}:{}",
                text.get(..text.len().checked_sub(2)?)?,
                text.get(text.len() - 2..)?
            ))
        })?;
    u64::try_from(time.unix_timestamp_nanos() / 1_000_000).ok()
}
