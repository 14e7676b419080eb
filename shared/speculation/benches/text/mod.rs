//! Text to measure with: documents of 100 to 900 tokens, half of it from templates with slots that are filled by rank
//! (common values, rare values, numbers), half of it running text in which every token has favourite successors.

use refrain_suffix_index::Token;

/// Token ids from here on are numbers.
const WORDS: u64 = 100_000;

/// A generator of documents; always the same ones.
pub(crate) struct Corpus {
    random: Random,
    templates: Vec<Vec<Piece>>,
}

#[derive(Clone)]
enum Piece {
    Text(Vec<Token>),
    /// One of so many values of a kind, some much more common than others.
    Value {
        kind: u64,
        values: u64,
    },
    /// Digits that say nothing about each other.
    Number(usize),
}

impl Corpus {
    pub(crate) fn new() -> Self {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let templates = (0..3_000)
            .map(|_| {
                let pieces = 4 + random.below(24);
                (0..pieces)
                    .map(|_| match random.below(8) {
                        0 => Piece::Number(2 + random.below(4) as usize),
                        1 | 2 => Piece::Value {
                            kind: random.below(500),
                            values: 8 << random.below(8),
                        },
                        _ => {
                            let len = 4 + random.below(28) as usize;
                            Piece::Text(random.text(len))
                        }
                    })
                    .collect()
            })
            .collect();
        Corpus { random, templates }
    }

    /// Documents of at least so many tokens in all.
    pub(crate) fn documents(&mut self, tokens: usize) -> Vec<Vec<Token>> {
        let mut documents = Vec::new();
        let mut made = 0;
        while made < tokens {
            let document = self.document();
            made += document.len();
            documents.push(document);
        }
        documents
    }

    pub(crate) fn document(&mut self) -> Vec<Token> {
        let len = 100 + self.random.below(800) as usize;
        let mut document = Vec::new();
        while document.len() < len {
            if self.random.below(2) == 0 {
                let len = 16 + self.random.below(150) as usize;
                document.extend(self.random.text(len));
                continue;
            }
            let template = self.random.rank(self.templates.len() as u64) as usize;
            for piece in &self.templates[template] {
                match piece {
                    Piece::Text(text) => document.extend(text),
                    Piece::Value { kind, values } => {
                        let mut value = Random(kind << 20 | self.random.rank(*values) | 1);
                        let len = 1 + value.below(4) as usize;
                        document.extend(value.text(len));
                    }
                    Piece::Number(digits) => {
                        let digit = |_| (WORDS + self.random.below(1000)) as Token;
                        document.extend((0..*digits).map(digit));
                    }
                }
            }
        }
        document
    }
}

/// A generator of numbers; not 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }

    /// A rank below `bound` that comes about in proportion to 1 / (rank + 1).
    fn rank(&mut self, bound: u64) -> u64 {
        let uniform = self.below(1 << 32) as f64 / (1u64 << 32) as f64;
        ((bound as f64 + 1.0).powf(uniform) as u64 - 1).min(bound - 1)
    }

    /// Running text: each token is followed by one of its own successors, most often by the first of them.
    fn text(&mut self, len: usize) -> Vec<Token> {
        let mut last = self.rank(WORDS);
        (0..len)
            .map(|_| {
                let successor = self.rank(400);
                // Where a token leads is spread over the vocabulary, common words more often.
                let mut spread = Random(((last << 16 | successor) * 0x9e37_79b9) | 1);
                spread.below(2);
                last = spread.rank(WORDS);
                last as Token
            })
            .collect()
    }
}
