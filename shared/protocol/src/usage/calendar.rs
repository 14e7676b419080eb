//! Hours, days and months of the calendar in UTC, as numbers.

use std::ops::Range;

use time::format_description::well_known::Rfc3339;
use time::{Date, Month, OffsetDateTime, Time, UtcOffset};

const HOUR_S: u64 = 3_600;
const DAY_HOURS: u32 = 24;

/// A length of time in the calendar of UTC. The periods of one length have consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// An hour, numbered since 1970.
    Hour,
    /// A day, numbered since 1970.
    Day,
    /// A month, numbered as twelve times the year, plus 0 for January.
    Month,
}

/// The hour of a time in Unix seconds.
pub fn hour_of(unix_s: u64) -> u32 {
    u32::try_from(unix_s / HOUR_S).unwrap_or(u32::MAX)
}

/// The hour that a text names: a date such as `2027-01-31`, which begins at midnight in UTC, or a time such as
/// `2027-01-31T17:00:00Z`. A time within an hour stands for the beginning of that hour.
pub fn parse_hour(text: &str) -> Option<u32> {
    let whole = match text.len() {
        10 => format!("{text}T00:00:00Z"),
        _ => text.to_owned(),
    };
    let time = OffsetDateTime::parse(&whole, &Rfc3339).ok()?;
    Some(hour_of(u64::try_from(time.unix_timestamp()).ok()?))
}

/// The hours that somebody asks about: from the beginning of this month until the end of the present hour, unless
/// they say otherwise. `None` if there is no hour between.
pub fn hours_asked(from: Option<u32>, until: Option<u32>, now_hour: u32) -> Option<Range<u32>> {
    let month = Period::Month.first_hour(Period::Month.number(now_hour));
    let hours = from.unwrap_or(month)..until.unwrap_or(now_hour.saturating_add(1));
    (!hours.is_empty()).then_some(hours)
}

fn time_of(hour: u32) -> OffsetDateTime {
    let seconds = i64::from(hour) * HOUR_S.cast_signed();
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

impl Period {
    /// The number of the period that an hour belongs to.
    pub fn number(self, hour: u32) -> u32 {
        match self {
            Period::Hour => hour,
            Period::Day => hour / DAY_HOURS,
            Period::Month => {
                let time = time_of(hour);
                time.year().unsigned_abs() * 12 + u32::from(u8::from(time.month())) - 1
            }
        }
    }

    /// The first hour of a period.
    pub fn first_hour(self, number: u32) -> u32 {
        match self {
            Period::Hour => number,
            Period::Day => number.saturating_mul(DAY_HOURS),
            Period::Month => {
                let year = i32::try_from(number / 12).unwrap_or(i32::MAX);
                let month = Month::try_from((number % 12 + 1) as u8).unwrap_or(Month::January);
                let date = Date::from_calendar_date(year, month, 1);
                let time = date.map(|date| {
                    OffsetDateTime::new_in_offset(date, Time::MIDNIGHT, UtcOffset::UTC)
                });
                let unix_s = time.map_or(0, OffsetDateTime::unix_timestamp);
                hour_of(unix_s.unsigned_abs())
            }
        }
    }

    /// The beginning of a period as in RFC 3339, such as `2027-01-31T00:00:00Z`.
    pub fn start_text(self, number: u32) -> String {
        let time = time_of(self.first_hour(number));
        time.format(&Rfc3339).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_begin_where_the_one_before_ends() {
        for (text, day, month) in [
            ("1970-01-01T00:00:00Z", 0, 1970 * 12),
            ("2026-12-31T23:59:59Z", 20_818, 2026 * 12 + 11),
            ("2027-01-01T00:00:00Z", 20_819, 2027 * 12),
            ("2028-02-29T12:00:00Z", 21_243, 2028 * 12 + 1),
        ] {
            let hour = parse_hour(text).unwrap();
            assert_eq!(Period::Day.number(hour), day, "{text}");
            assert_eq!(Period::Month.number(hour), month, "{text}");
        }
        let mut hour = parse_hour("2026-01-01").unwrap();
        for month in 2026 * 12..2029 * 12 {
            assert_eq!(Period::Month.first_hour(month), hour);
            assert_eq!(Period::Month.number(hour), month);
            hour = Period::Month.first_hour(month + 1);
            assert_eq!(Period::Month.number(hour - 1), month);
        }
    }

    #[test]
    fn times_are_read_and_written_in_utc() {
        let hour = parse_hour("2027-01-31T18:59:00+01:00").unwrap();
        assert_eq!(Period::Hour.start_text(hour), "2027-01-31T17:00:00Z");
        let day = Period::Day.number(hour);
        assert_eq!(Period::Day.start_text(day), "2027-01-31T00:00:00Z");
        let month = Period::Month.number(hour);
        assert_eq!(Period::Month.start_text(month), "2027-01-01T00:00:00Z");
        assert_eq!(parse_hour("2027-01-31"), Some(day * 24));
        for text in ["", "yesterday", "2027-02-30", "1969-01-01", "2027-01-31T17"] {
            assert_eq!(parse_hour(text), None, "{text}");
        }
    }

    #[test]
    fn no_number_makes_a_panic() {
        for number in [0, 1, 23, u32::MAX / 24, u32::MAX] {
            for period in [Period::Hour, Period::Day, Period::Month] {
                let _ = (
                    period.number(number),
                    period.first_hour(number),
                    period.start_text(number),
                );
            }
        }
    }
}
