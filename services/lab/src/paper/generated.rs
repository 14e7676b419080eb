//! Calls that stand for those of a workload where no trace is given. A seed makes the same calls everywhere.

use refrain_suffix_index::Token;

use crate::logs::RecordedCall;
use crate::simulate::Random;

/// Different tokens.
const VOCABULARY: f64 = 20_000.0;
/// Phrases that recur.
const PHRASES: usize = 800;
/// Tasks of a workload.
const TASKS: usize = 40;
/// Samples of each task.
const SAMPLES: usize = 4;

/// A kind of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Agents that take their turns several times, in much the same words.
    Agents,
    /// Answers of which little was said before.
    OpenText,
    /// Twenty samples of each prompt.
    Samples,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Agents => "generated agents",
            Kind::OpenText => "generated open text",
            Kind::Samples => "generated samples",
        }
    }

    /// The share of phrases that were never said before, and of those that another sample says otherwise.
    fn fresh_and_varied(self) -> (f64, f64) {
        match self {
            Kind::Agents => (0.15, 0.15),
            Kind::OpenText => (0.75, 0.9),
            Kind::Samples => (0.5, 0.5),
        }
    }

    /// The calls that this seed makes, at most so many.
    pub(super) fn calls(self, seed: u64, calls_max: usize) -> Vec<RecordedCall> {
        let mut writer = Writer::new(seed, self);
        let mut calls = Vec::new();
        for task in 0..TASKS {
            if calls.len() >= calls_max {
                break;
            }
            match self {
                Kind::Samples => writer.group(task, &mut calls),
                Kind::Agents | Kind::OpenText => writer.sessions(task, &mut calls),
            }
        }
        calls.truncate(calls_max);
        calls
    }
}

type Phrase = Vec<Token>;

/// Says things in phrases, of which a few are frequent and most are rare.
struct Writer {
    random: Random,
    phrases: Vec<Phrase>,
    kind: Kind,
    system: Vec<Token>,
}

impl Writer {
    fn new(seed: u64, kind: Kind) -> Self {
        let mut writer = Writer {
            random: Random::new(seed, kind as u64),
            phrases: Vec::new(),
            kind,
            system: Vec::new(),
        };
        writer.phrases = (0..PHRASES).map(|_| writer.fresh()).collect();
        writer.system = (0..20).flat_map(|_| writer.phrase()).collect();
        writer
    }

    /// A whole number from `from` on, below `to`.
    fn between(&mut self, from: usize, to: usize) -> usize {
        from + (self.random.uniform() * (to - from) as f64) as usize
    }

    /// A new phrase. The product of two uniform draws is skewed about as much as the frequency of tokens.
    fn fresh(&mut self) -> Phrase {
        let len = self.between(4, 25);
        let mut token = || (VOCABULARY * self.random.uniform() * self.random.uniform()) as Token;
        (0..len).map(|_| token()).collect()
    }

    fn phrase(&mut self) -> Phrase {
        if self.random.uniform() < self.kind.fresh_and_varied().0 {
            return self.fresh();
        }
        let at = (PHRASES as f64 * self.random.uniform().powi(2)) as usize;
        self.phrases[at.min(PHRASES - 1)].clone()
    }

    fn answer(&mut self, from: usize, to: usize) -> Vec<Phrase> {
        let len = self.between(from, to);
        (0..len).map(|_| self.phrase()).collect()
    }

    /// Another sample of the same answer.
    fn varied(&mut self, answer: &[Phrase]) -> Vec<Token> {
        let share = self.kind.fresh_and_varied().1;
        let mut said = Vec::new();
        for phrase in answer {
            match self.random.uniform() < share {
                true => said.extend(self.phrase()),
                false => said.extend(phrase),
            }
        }
        said
    }

    fn sessions(&mut self, task: usize, calls: &mut Vec<RecordedCall>) {
        let question = self.answer(6, 7).concat();
        let turns = self.between(2, 6);
        let answers: Vec<Vec<Phrase>> = (0..turns).map(|_| self.answer(2, 10)).collect();
        for sample in 0..SAMPLES {
            let mut prompt = [&self.system[..], &question].concat();
            for answer in &answers {
                let output = self.varied(answer);
                calls.push(RecordedCall {
                    workload: Some(self.kind.name().to_owned()),
                    session: Some(format!("{task}/{sample}")),
                    prompt: prompt.clone(),
                    output: output.clone(),
                    ..RecordedCall::default()
                });
                prompt.extend(output);
                prompt.extend(self.phrase());
            }
        }
    }

    fn group(&mut self, task: usize, calls: &mut Vec<RecordedCall>) {
        let question = self.answer(6, 7).concat();
        let prompt = [&self.system[..], &question].concat();
        let answer = self.answer(10, 30);
        for _ in 0..20 {
            calls.push(RecordedCall {
                workload: Some(self.kind.name().to_owned()),
                group: Some(task.to_string()),
                prompt: prompt.clone(),
                output: self.varied(&answer),
                ..RecordedCall::default()
            });
        }
    }
}
