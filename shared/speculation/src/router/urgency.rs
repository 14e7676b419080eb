//! The pace and the priority that a request wants in the steps that it shares with others.

/// The weight of a request's tokens compared with those of others in the same batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Half the weight of a normal request.
    Low,
    /// The weight of most requests.
    #[default]
    Normal,
    /// Twice the weight of a normal request.
    High,
}

impl Priority {
    /// The factor of the worth of its tokens.
    pub(super) fn weight(self) -> f32 {
        match self {
            Priority::Low => 0.5,
            Priority::Normal => 1.0,
            Priority::High => 2.0,
        }
    }
}

/// The progress of a request, compared with the time that it wants between its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Seconds per output token that it wants at most, on average.
    pub tpot_s: f64,
    /// Seconds since its first token.
    pub elapsed_s: f64,
    /// Tokens emitted after that one.
    pub tokens: u32,
}

impl Pace {
    /// Tokens that a step of `step_seconds` must bring so that the request keeps its pace: below 1 if it is ahead.
    /// (AdaServe, arXiv 2501.12162, section 4.)
    pub(super) fn due_tokens(&self, step_seconds: f64) -> f32 {
        let wanted = (self.elapsed_s + step_seconds) / self.tpot_s;
        let due = wanted - f64::from(self.tokens);
        if due.is_finite() { due as f32 } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_says_what_is_due() {
        let pace = Pace {
            tpot_s: 0.02,
            elapsed_s: 1.0,
            tokens: 48,
        };
        // 51 tokens are due after a step of 20 ms.
        assert!((pace.due_tokens(0.02) - 3.0).abs() < 1e-5);
        let ahead = Pace { tokens: 80, ..pace };
        assert!(ahead.due_tokens(0.02) < 1.0);
        let nonsense = Pace {
            tpot_s: 0.0,
            ..pace
        };
        assert_eq!(nonsense.due_tokens(0.02), 0.0);
    }
}
