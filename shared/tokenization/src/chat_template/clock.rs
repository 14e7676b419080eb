//! The date that a template asks for with `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

/// A date and a time of day, without a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    /// Days since 1970-01-01.
    days: i64,
    /// Seconds since midnight.
    seconds: i64,
}

const DAY_S: i64 = 86_400;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// 1970-01-01 was a Thursday.
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

impl Moment {
    /// The time now in UTC, so that all gateways of a mesh write the same prompt.
    pub(super) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0));
        Moment {
            days: seconds.div_euclid(DAY_S),
            seconds: seconds.rem_euclid(DAY_S),
        }
    }

    /// Reads `2026-01-31`, or with a time of day `2026-01-31T12:00:00`. `None` for anything else.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "00:00:00"));
        let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
        let [hour, minute, second] =
            numbers(time.strip_suffix('Z').unwrap_or(time), ':', [2, 2, 2])?;
        let days = days_of(year, month, day);
        let moment = Moment {
            days,
            seconds: (hour * 60 + minute) * 60 + second,
        };
        let is_date = moment.date() == (year, month, day) && (1..=12).contains(&month);
        (is_date && hour < 24 && minute < 60 && second < 60).then_some(moment)
    }

    /// Year, month and day.
    fn date(self) -> (i64, i64, i64) {
        // Years begin in March here, so that the leap day is the last of a year.
        let days = self.days + 719_468;
        let era = days.div_euclid(146_097);
        let of_era = days.rem_euclid(146_097);
        let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        (year + era * 400 + i64::from(month <= 2), month, day)
    }

    /// Python's `strftime` in English, for a time without a zone. An unknown conversion stays as it is.
    pub(super) fn format(self, format: &str) -> String {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (
            self.seconds / 3_600,
            self.seconds / 60 % 60,
            self.seconds % 60,
        );
        let weekday = self.days.rem_euclid(7) as usize;
        let month_name = MONTHS[(month - 1).clamp(0, 11) as usize];
        let mut text = String::new();
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let mut conversion = rest.next();
            // `%-d` is a day without a leading zero.
            let is_bare = conversion == Some('-');
            if is_bare {
                conversion = rest.next();
            }
            let number = |number: i64, width: usize| match is_bare {
                true => number.to_string(),
                false => format!("{number:0width$}"),
            };
            let hour_of_12 = (hour + 11) % 12 + 1;
            let part = match conversion {
                Some('Y') => number(year, 4),
                Some('y') => number(year.rem_euclid(100), 2),
                Some('m') => number(month, 2),
                Some('d') => number(day, 2),
                Some('e') => format!("{day:2}"),
                Some('j') => number(self.days - days_of(year, 1, 1) + 1, 3),
                Some('H') => number(hour, 2),
                Some('I') => number(hour_of_12, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('f') => "000000".into(),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
                Some('B') => month_name.into(),
                Some('b' | 'h') => month_name[..3].into(),
                Some('A') => WEEKDAYS[weekday].into(),
                Some('a') => WEEKDAYS[weekday][..3].into(),
                Some('u') => number((self.days + 3).rem_euclid(7) + 1, 1),
                Some('w') => number((self.days + 4).rem_euclid(7), 1),
                Some('F') => self.format("%Y-%m-%d"),
                Some('T' | 'X') => self.format("%H:%M:%S"),
                Some('R') => self.format("%H:%M"),
                Some('D' | 'x') => self.format("%m/%d/%y"),
                Some('c') => self.format("%a %b %e %H:%M:%S %Y"),
                Some('z' | 'Z') => String::new(),
                Some('n') => "\n".into(),
                Some('t') => "\t".into(),
                Some('%') => "%".into(),
                Some(other) => format!("%{}{other}", if is_bare { "-" } else { "" }),
                None => "%".into(),
            };
            text.push_str(&part);
        }
        text
    }
}

/// Days from 1970-01-01 to a date.
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (if month > 2 { month - 3 } else { month + 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Three numbers of the given widths.
fn numbers(text: &str, separator: char, widths: [usize; 3]) -> Option<[i64; 3]> {
    let mut parts = text.split(separator);
    let mut numbers = [0; 3];
    for (number, width) in numbers.iter_mut().zip(widths) {
        let part = parts.next()?;
        let is_number = part.len() == width && part.bytes().all(|byte| byte.is_ascii_digit());
        *number = is_number.then(|| part.parse().ok())??;
    }
    parts.next().is_none().then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let moment = Moment::parse("2026-03-04T15:06:07").unwrap();
        for (format, expected) in [
            ("%Y-%m-%d", "2026-03-04"),
            ("%d %b %Y", "04 Mar 2026"),
            ("%-d %B %y, %A %a", "4 March 26, Wednesday Wed"),
            ("%H:%M:%S %I %p %j", "15:06:07 03 PM 063"),
            ("%u %w %e %c", "3 3  4 Wed Mar  4 15:06:07 2026"),
            ("100%% %Q %", "100% %Q %"),
        ] {
            assert_eq!(moment.format(format), expected);
        }
        let leap = Moment::parse("2024-02-29").unwrap();
        assert_eq!(
            leap.format("%F %T %j %A"),
            "2024-02-29 00:00:00 060 Thursday"
        );
        assert_eq!(Moment::parse("1970-01-01").unwrap().days, 0);
        assert_eq!(
            Moment::parse("1969-12-31").unwrap().format("%F %a"),
            "1969-12-31 Wed"
        );
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for text in [
            "",
            "today",
            "2026-02-29",
            "2026-13-01",
            "2026-1-1",
            "2026-01-00",
            "2026-01-01T24:00:00",
            "-026-01-01",
        ] {
            assert_eq!(Moment::parse(text), None, "{text}");
        }
    }
}
