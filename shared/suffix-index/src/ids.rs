//! The names of tokens and documents, and of places in documents.

/// Id of a token, as the tokenizer numbers them.
pub type Token = u32;

/// The caller's name for a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocumentKey(pub u128);

/// The place of an offered token. Callers use it to credit a document with an accepted draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The document that contains the token.
    pub document: DocumentKey,
    /// Offset of the token in the document's output.
    pub position: u32,
}
