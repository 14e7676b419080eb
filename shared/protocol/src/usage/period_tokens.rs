//! Tokens of the newest day and month.

use super::calendar::Period;

/// Tokens of the newest day and month in which something was counted. Earlier ones are of no use to budgets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeriodTokens {
    day: u32,
    day_tokens: u64,
    month: u32,
    month_tokens: u64,
}

impl PeriodTokens {
    /// Tokens of a day and a month, by their numbers.
    pub fn of(day: (u32, u64), month: (u32, u64)) -> Self {
        PeriodTokens {
            day: day.0,
            day_tokens: day.1,
            month: month.0,
            month_tokens: month.1,
        }
    }

    /// Adds tokens of an hour.
    pub fn add(&mut self, hour: u32, tokens: u64) {
        self.add_to_day(Period::Day.number(hour), tokens);
        self.add_to_month(Period::Month.number(hour), tokens);
    }

    fn add_to_day(&mut self, day: u32, tokens: u64) {
        if day > self.day {
            (self.day, self.day_tokens) = (day, 0);
        }
        if day == self.day {
            self.day_tokens = self.day_tokens.saturating_add(tokens);
        }
    }

    /// Adds tokens to a month alone, whatever their days were.
    pub fn add_to_month(&mut self, month: u32, tokens: u64) {
        if month > self.month {
            (self.month, self.month_tokens) = (month, 0);
        }
        if month == self.month {
            self.month_tokens = self.month_tokens.saturating_add(tokens);
        }
    }

    /// The later one of two states of the same counts, for each period.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let later = |(number, tokens): (u32, u64), (of, others): (u32, u64)| match number.cmp(&of) {
            std::cmp::Ordering::Less => (of, others),
            std::cmp::Ordering::Greater => (number, tokens),
            std::cmp::Ordering::Equal => (number, tokens.max(others)),
        };
        PeriodTokens::of(
            later((self.day, self.day_tokens), (other.day, other.day_tokens)),
            later(
                (self.month, self.month_tokens),
                (other.month, other.month_tokens),
            ),
        )
    }

    /// Tokens of a day, if it is the newest one.
    pub fn of_day(self, day: u32) -> u64 {
        if self.day == day { self.day_tokens } else { 0 }
    }

    /// Tokens of a month, if it is the newest one.
    pub fn of_month(self, month: u32) -> u64 {
        if self.month == month {
            self.month_tokens
        } else {
            0
        }
    }

    /// The number of the newest month.
    pub fn month(self) -> u32 {
        self.month
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::parse_hour;

    #[test]
    fn a_new_day_and_a_new_month_begin_with_nothing() {
        let mut tokens = PeriodTokens::default();
        let at = |text| parse_hour(text).unwrap();
        for (text, count) in [
            ("2027-01-30T23:00:00Z", 100),
            ("2027-01-31T00:00:00Z", 20),
            ("2027-01-30T23:00:00Z", 3),
        ] {
            tokens.add(at(text), count);
        }
        let (day, month) = (
            Period::Day.number(at("2027-01-31")),
            Period::Month.number(at("2027-01-31")),
        );
        assert_eq!((tokens.of_day(day), tokens.of_month(month)), (20, 123));
        tokens.add_to_month(month, 7);
        assert_eq!((tokens.of_day(day), tokens.of_month(month)), (20, 130));
        tokens.add(at("2027-02-01"), 1);
        assert_eq!((tokens.of_day(day), tokens.of_month(month)), (0, 0));
        assert_eq!((tokens.of_day(day + 1), tokens.of_month(month + 1)), (1, 1));
    }

    #[test]
    fn the_later_state_holds_for_each_period() {
        let today = PeriodTokens::of((5, 10), (1, 90));
        let late = PeriodTokens::of((4, 70), (1, 80));
        assert_eq!(today.merge(late), today);
        assert_eq!(late.merge(today), today);
        let more = PeriodTokens::of((5, 11), (1, 70));
        assert_eq!(today.merge(more), PeriodTokens::of((5, 11), (1, 90)));
    }
}
