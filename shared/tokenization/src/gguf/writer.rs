//! Writes small GGUF files for tests.

/// A file of which the tensors are left out.
#[derive(Clone, Default)]
pub(crate) struct Writer {
    entries: u64,
    body: Vec<u8>,
}

/// A value in a file.
pub(crate) enum Item<'a> {
    Count(u32),
    Flag(bool),
    Text(&'a str),
    Texts(Vec<String>),
    Kinds(Vec<i32>),
    Scores(Vec<f32>),
}

impl Writer {
    pub(crate) fn with(mut self, key: &str, item: &Item<'_>) -> Self {
        self.entries += 1;
        self.text(key);
        match item {
            Item::Count(count) => self.typed(4, &count.to_le_bytes()),
            Item::Flag(flag) => self.typed(7, &[u8::from(*flag)]),
            Item::Text(text) => {
                self.typed(8, &[]);
                self.text(text);
            }
            Item::Texts(texts) => {
                self.list(8, texts.len());
                for text in texts {
                    self.text(text);
                }
            }
            Item::Kinds(kinds) => {
                self.list(5, kinds.len());
                self.body
                    .extend(kinds.iter().flat_map(|kind| kind.to_le_bytes()));
            }
            Item::Scores(scores) => {
                self.list(6, scores.len());
                self.body
                    .extend(scores.iter().flat_map(|score| score.to_le_bytes()));
            }
        }
        self
    }

    /// A value of any type, by its bytes.
    pub(crate) fn typed(&mut self, kind: u32, bytes: &[u8]) {
        self.body.extend(kind.to_le_bytes());
        self.body.extend(bytes);
    }

    /// Takes bytes from the end of the last value.
    pub(crate) fn truncate(&mut self, bytes: usize) {
        self.body.truncate(self.body.len() - bytes);
    }

    fn list(&mut self, kind: u32, length: usize) {
        self.typed(9, &kind.to_le_bytes());
        self.body.extend((length as u64).to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.body.extend((text.len() as u64).to_le_bytes());
        self.body.extend(text.as_bytes());
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self, version: u32) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes.extend(&self.body);
        bytes
    }
}
