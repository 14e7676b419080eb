//! Engines with known speeds, and the figures that are shown of them.

use super::super::Route;
use super::*;

/// An engine whose steps with drafts bring `drafted_tokens` each, and where every tenth step is plain.
#[derive(Clone, Copy)]
struct Machine {
    batch: u32,
    plain_s: f64,
    drafted_s: f64,
    drafted_tokens: u32,
}

const DOUBLE: Machine = Machine {
    batch: 4,
    plain_s: 0.01,
    drafted_s: 0.02,
    drafted_tokens: 16,
};

/// An estimator and its clock.
struct Watched {
    estimator: GainEstimator,
    now: f64,
    steps: u64,
}

impl Watched {
    fn new() -> Self {
        Watched {
            estimator: GainEstimator::new(GainParams::default()),
            now: 1000.0,
            steps: 0,
        }
    }

    fn at(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    fn sample(&mut self, batch: u32, side: GainSide, tokens: u32, seconds: f64) {
        self.now += seconds;
        let sample = GainSample {
            batch,
            side,
            tokens,
            seconds,
        };
        self.estimator.observe(self.at(), sample);
    }

    /// Decodes for so long.
    fn run(&mut self, machine: Machine, seconds: f64) {
        let end = self.now + seconds;
        while self.now < end {
            self.steps += 1;
            // Accepted lengths and step times vary: by 20 %, with no mean of their own.
            let vary = [0.8, 1.1, 1.2, 0.9][(self.steps / 10 % 4) as usize];
            if self.steps.is_multiple_of(10) {
                let seconds = machine.plain_s * vary;
                self.sample(machine.batch, GainSide::Plain, machine.batch, seconds);
            } else {
                let seconds = machine.drafted_s * vary;
                let tokens = machine.drafted_tokens;
                self.sample(machine.batch, GainSide::Drafted, tokens, seconds);
            }
        }
    }

    fn warmed_up() -> Self {
        let mut watched = Watched::new();
        watched.run(DOUBLE, 61.0);
        watched
    }

    fn readings(&self) -> Vec<GainReading> {
        self.estimator.readings(self.at())
    }

    fn reading(&self) -> GainReading {
        let readings = self.readings();
        assert_eq!(readings.len(), 1, "{readings:?}");
        readings[0]
    }
}

fn assert_near(value: Option<f64>, expected: f64) {
    let value = value.expect("a ratio");
    assert!(
        (value / expected - 1.0).abs() < 0.05,
        "{value} for {expected}"
    );
}

#[test]
fn it_shows_the_ratio_with_its_error_and_its_steps() {
    let mut watched = Watched::warmed_up();
    watched.run(DOUBLE, 300.0);
    let reading = watched.reading();
    assert_eq!(reading.batch, 4);
    assert_near(reading.ratio, 2.0);
    let error = reading.error.unwrap();
    assert!(error > 0.0 && error < 0.05, "{error}");
    // Steps take 19 ms in the mean.
    assert!((15_000 - 1_400..15_000).contains(&reading.drafted_steps));
    assert!((1_400..1_700).contains(&reading.plain_steps));
}

#[test]
fn a_slow_start_does_not_count() {
    let mut watched = Watched::new();
    // Plain decoding is five times as slow at first.
    let cold = Machine {
        plain_s: 0.05,
        ..DOUBLE
    };
    watched.run(cold, 59.0);
    assert_eq!(watched.readings(), []);
    watched.run(DOUBLE, 100.0);
    assert_near(watched.reading().ratio, 2.0);
    // The same after a restart of the engine; the figures from before it are gone.
    watched.estimator.restart();
    assert_eq!(watched.reading(), GainReading::nothing(4));
    watched.run(cold, 59.0);
    assert_eq!(watched.reading(), GainReading::nothing(4));
    watched.run(DOUBLE, 100.0);
    assert_near(watched.reading().ratio, 2.0);
}

#[test]
fn the_first_steps_at_a_batch_size_do_not_count() {
    let mut watched = Watched::warmed_up();
    let of_eight = Machine {
        batch: 8,
        drafted_tokens: 24,
        ..DOUBLE
    };
    // The engine compiles for a minute in each of the first steps of either side.
    for _ in 0..FIRST_STEPS {
        watched.sample(8, GainSide::Plain, 8, 60.0);
        watched.sample(8, GainSide::Drafted, 8, 1.0);
    }
    watched.run(of_eight, 100.0);
    let readings = watched.readings();
    assert_eq!(readings[1].batch, 8);
    assert_near(readings[1].ratio, 1.5);
}

#[test]
fn few_steps_show_no_ratio_and_say_so() {
    // One trial of many steps in one moment, at which something else slowed the machine down.
    let mut watched = Watched::warmed_up();
    let unseen = watched.reading();
    for _ in 0..200 {
        watched.sample(4, GainSide::Drafted, 16, 0.02);
    }
    for _ in 0..40 {
        watched.sample(4, GainSide::Plain, 4, 0.03);
    }
    for _ in 0..20_000 {
        watched.sample(4, GainSide::Drafted, 16, 0.02);
    }
    let reading = watched.reading();
    assert!(reading.plain_steps >= 40 && reading.drafted_steps > 19_000);
    assert_eq!((reading.ratio, reading.error), (None, None));
    assert!(unseen.plain_steps < 20 && unseen.ratio.is_none());

    // Some trials that contradict each other.
    for plain_s in [0.01, 0.03, 0.01, 0.05, 0.01] {
        for _ in 0..40 {
            watched.sample(4, GainSide::Plain, 4, plain_s);
        }
        for _ in 0..500 {
            watched.sample(4, GainSide::Drafted, 16, 0.02);
        }
    }
    let reading = watched.reading();
    assert_eq!(reading.ratio, None);
    assert!(reading.error.unwrap() > 0.2, "{reading:?}");
}

#[test]
fn the_error_holds_about_nine_times_in_ten() {
    let mut noise = 7u64;
    let mut uniform = || {
        // xorshift64*
        noise ^= noise >> 12;
        noise ^= noise << 25;
        noise ^= noise >> 27;
        (noise.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut known, mut held) = (0, 0);
    for _ in 0..300 {
        let mut estimator = GainEstimator::new(GainParams {
            warm_up: Duration::ZERO,
            ..GainParams::default()
        });
        let at = |block: u32, step: u32| Duration::from_millis(u64::from(block * 5000 + step * 50));
        for block in 0..40 {
            // Others slow the machine down for five seconds at a time, and texts are easier or harder to draft.
            let slow = 0.7 + 0.6 * uniform();
            let accepted = 2.0 * uniform();
            let is_trial = uniform() < 0.3;
            for step in 0..100 {
                let is_plain = is_trial && step < 24;
                let (side, tokens, seconds) = match is_plain {
                    true => (GainSide::Plain, 4, 0.01),
                    false => {
                        let more = (8.0 * accepted * uniform()).round() as u32;
                        (GainSide::Drafted, 4 + more, 0.01)
                    }
                };
                let sample = GainSample {
                    batch: 4,
                    side,
                    tokens,
                    seconds: seconds * slow,
                };
                estimator.observe(at(block, step), sample);
            }
        }
        let reading = estimator.readings(at(39, 99))[0];
        // Four tokens more than the four of a plain step, in the mean.
        if let Some((ratio, error)) = reading.ratio.zip(reading.error) {
            known += 1;
            held += u32::from((2.0 - ratio).abs() <= error * ratio);
        }
    }
    assert!(known > 200, "{known} of 300 are known");
    let share = f64::from(held) / f64::from(known);
    assert!((0.85..0.99).contains(&share), "{share} of {known}");
}

#[test]
fn a_figure_ages_while_nothing_is_decoded() {
    let mut watched = Watched::warmed_up();
    watched.run(DOUBLE, 100.0);
    let later = |watched: &Watched, seconds: u64| {
        let at = watched.at() + Duration::from_secs(seconds);
        watched.estimator.readings(at)[0]
    };
    assert_near(later(&watched, 119).ratio, 2.0);
    assert_eq!(later(&watched, 121), GainReading::nothing(4));
    // Traffic of another batch size is no traffic of this one.
    let of_one = Machine {
        batch: 1,
        drafted_tokens: 4,
        ..DOUBLE
    };
    watched.run(of_one, 130.0);
    let readings = watched.readings();
    assert_eq!(
        (readings[0].batch, readings[1]),
        (1, GainReading::nothing(4))
    );
    assert_near(readings[0].ratio, 2.0);
    // The steps in the window count again once there is traffic.
    watched.run(DOUBLE, 10.0);
    assert_near(watched.readings()[1].ratio, 2.0);
}

#[test]
fn what_is_older_than_the_window_is_forgotten() {
    let mut watched = Watched::warmed_up();
    watched.run(DOUBLE, 600.0);
    let slower = Machine {
        drafted_tokens: 6,
        ..DOUBLE
    };
    watched.run(slower, 605.0);
    assert_near(watched.reading().ratio, 0.75);
    assert!(watched.estimator.blocks.len() <= WINDOW_BLOCKS as usize);
}

#[test]
fn both_sides_are_compared_at_equal_batch_sizes() {
    // A step of five takes as long as one of eight, and drafts bring nothing. Most plain steps are of five requests,
    // most steps with drafts are of eight, and both are shown together.
    let mut watched = Watched::warmed_up();
    for _ in 0..2000 {
        for (batch, side, steps) in [
            (5, GainSide::Plain, 9),
            (5, GainSide::Drafted, 1),
            (8, GainSide::Plain, 1),
            (8, GainSide::Drafted, 9),
        ] {
            for _ in 0..steps {
                watched.sample(batch, side, batch, 0.01);
            }
        }
    }
    let readings = watched.readings();
    assert_eq!(readings[1].batch, 8);
    let ratio = readings[1].ratio.unwrap();
    assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
    // A size that was only seen with drafts does not count.
    let before = readings[1].drafted_steps;
    for _ in 0..100 {
        watched.sample(7, GainSide::Drafted, 70, 0.01);
    }
    let after = watched.readings()[1];
    assert_eq!((after.drafted_steps, after.ratio), (before, Some(ratio)));
}

/// A step of two `auto` requests that emit as many tokens as they are given.
fn step(emitted: u32, draft_tokens: u32) -> Step {
    let item = StepPart {
        route: Some(match draft_tokens {
            0 => Route::Plain,
            _ => Route::Suffix,
        }),
        is_auto: true,
        may_use_head: false,
        predictability: 0.0,
        context_tokens: 1,
        text_tokens: 100,
        draft_tokens,
        head: None,
        head_drafted: 0,
        read_tokens: 0,
        emitted: Some(emitted),
    };
    Step {
        items: vec![item; 2],
        seconds: 0.01,
        compose_seconds: 0.002,
        ..Step::default()
    }
}

/// The sums of both sides after a minute, in which 1000 steps are like this one.
fn sums_of(step: &Step, may_draft: bool) -> Pair {
    let mut estimator = GainEstimator::new(GainParams::default());
    let at = |number: u64| Duration::from_millis(number * 70);
    for number in 0..1000 {
        estimator.observe_step(at(number), step, may_draft);
    }
    let mut all = Pair::default();
    for pair in estimator.blocks.iter().flat_map(|of| of.pairs.values()) {
        all.plain.add(&pair.plain);
        all.drafted.add(&pair.drafted);
    }
    all
}

#[test]
fn the_search_counts_against_drafts_alone() {
    let per_step = |sums: Sums| sums.seconds / sums.steps as f64;
    let drafted = sums_of(&step(4, 6), true);
    assert_eq!(drafted.plain.steps, 0);
    assert!((per_step(drafted.drafted) - 0.012).abs() < 1e-9);
    assert_eq!(drafted.drafted.tokens, 8 * drafted.drafted.steps);
    // Nothing was found. That is the lot of drafts too, and shows how long a plain step takes.
    let nothing = sums_of(&step(1, 0), true);
    assert!((per_step(nothing.drafted) - 0.012).abs() < 1e-9);
    assert!((per_step(nothing.plain) - 0.01).abs() < 1e-9);
    // Drafts were held back, or the settings forbid them at this batch size.
    let mut withheld = step(1, 0);
    withheld.withheld = true;
    for pair in [sums_of(&withheld, true), sums_of(&step(1, 0), false)] {
        assert_eq!(pair.drafted.steps, 0);
        assert!(pair.plain.steps > 100);
    }
}

#[test]
fn steps_that_did_other_work_do_not_count() {
    let mut reads_prompt = step(4, 6);
    let prompt = StepPart {
        route: None,
        context_tokens: 200,
        ..reads_prompt.items[0]
    };
    reads_prompt.items.push(prompt);
    let mut asked = step(4, 6);
    asked.items[0].is_auto = false;
    let mut failed = step(4, 6);
    failed.items[1].emitted = None;
    let mut reads_again = step(1, 0);
    reads_again.items[0].context_tokens = 40;
    for step in [reads_prompt, asked, failed, reads_again, Step::default()] {
        let pair = sums_of(&step, true);
        assert_eq!((pair.plain.steps, pair.drafted.steps), (0, 0));
    }
    let mut estimator = GainEstimator::new(GainParams::default());
    for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut step = step(4, 6);
        step.seconds = seconds;
        step.compose_seconds = 0.0;
        for number in 0..200 {
            estimator.observe_step(Duration::from_secs(number), &step, true);
        }
    }
    assert!(estimator.blocks.is_empty() && estimator.first_steps.is_empty());
}
