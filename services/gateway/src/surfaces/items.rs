//! The items of an output: its texts, its reasoning and its calls, in the order in which they came.

use refrain_output_parsers::Event;

/// An item of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) kind: ItemKind,
    /// Its text so far; of a call, its arguments.
    pub(super) text: String,
    /// Whether it has ended, and as it should.
    pub(super) end: ItemEnd,
}

/// The kind of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ItemKind {
    /// Text for the user.
    Text,
    /// Text of the reasoning.
    Reasoning,
    /// A call, with the name that the model gave it, if it did.
    Call { id: Option<String>, name: String },
}

/// The end of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemEnd {
    /// It still grows.
    Open,
    /// It is complete.
    Complete,
    /// It is a call whose arguments are not valid.
    Broken,
}

/// A change of the items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The item with this number begins.
    Begin(usize),
    /// It grows by a text.
    Grow(usize, String),
    /// It ends.
    End(usize),
}

/// The items of one output as it grows. At most the last one is open.
#[derive(Clone, Debug, Default)]
pub(super) struct Items {
    items: Vec<Item>,
}

impl Items {
    /// The items so far.
    pub(super) fn all(&self) -> &[Item] {
        &self.items
    }

    /// Whether there is a call among them.
    pub(super) fn has_calls(&self) -> bool {
        let is_call = |item: &Item| matches!(item.kind, ItemKind::Call { .. });
        self.items.iter().any(is_call)
    }

    /// Takes an event of the output.
    pub(super) fn apply(&mut self, event: Event, changes: &mut Vec<Change>) {
        match event {
            Event::Text(text) => self.grow(ItemKind::Text, text, changes),
            Event::Reasoning(text) => self.grow(ItemKind::Reasoning, text, changes),
            Event::CallStart { id, name, .. } => self.begin(ItemKind::Call { id, name }, changes),
            Event::CallArguments { delta, .. } => {
                if let Some(at) = self.open_call() {
                    self.extend(at, delta, changes);
                }
            }
            Event::CallEnd { intact, .. } => {
                if self.open_call().is_some() {
                    let end = if intact {
                        ItemEnd::Complete
                    } else {
                        ItemEnd::Broken
                    };
                    self.end(end, changes);
                }
            }
        }
    }

    /// Takes the end of the output.
    pub(super) fn finish(&mut self, changes: &mut Vec<Change>) {
        self.end(ItemEnd::Complete, changes);
    }

    fn open_call(&self) -> Option<usize> {
        let last = self.items.last()?;
        let is_open = matches!(last.kind, ItemKind::Call { .. }) && last.end == ItemEnd::Open;
        is_open.then_some(self.items.len() - 1)
    }

    fn grow(&mut self, kind: ItemKind, text: String, changes: &mut Vec<Change>) {
        if text.is_empty() {
            return;
        }
        let last = self.items.last();
        if !last.is_some_and(|last| last.kind == kind && last.end == ItemEnd::Open) {
            self.begin(kind, changes);
        }
        self.extend(self.items.len() - 1, text, changes);
    }

    fn begin(&mut self, kind: ItemKind, changes: &mut Vec<Change>) {
        self.end(ItemEnd::Complete, changes);
        changes.push(Change::Begin(self.items.len()));
        self.items.push(Item {
            kind,
            text: String::new(),
            end: ItemEnd::Open,
        });
    }

    fn extend(&mut self, at: usize, text: String, changes: &mut Vec<Change>) {
        if let Some(item) = self.items.get_mut(at) {
            item.text.push_str(&text);
            changes.push(Change::Grow(at, text));
        }
    }

    fn end(&mut self, end: ItemEnd, changes: &mut Vec<Change>) {
        let at = self.items.len().wrapping_sub(1);
        if let Some(last) = self.items.last_mut()
            && last.end == ItemEnd::Open
        {
            last.end = end;
            changes.push(Change::End(at));
        }
    }
}

/// Events of an output with everything in it, for the tests of writers.
#[cfg(test)]
pub(super) fn example() -> Vec<Event> {
    let call = |index, delta: &str| Event::CallArguments {
        index,
        delta: delta.into(),
    };
    vec![
        Event::Reasoning("Let ".into()),
        Event::Reasoning("me see.".into()),
        Event::Text("I ask.".into()),
        Event::CallStart {
            index: 0,
            id: Some("call_a".into()),
            name: "weather".into(),
        },
        call(0, "{\"city\":"),
        call(0, " \"Oslo\"}"),
        Event::CallEnd {
            index: 0,
            intact: true,
        },
        Event::CallStart {
            index: 1,
            id: Some("call_b".into()),
            name: "time".into(),
        },
        call(1, "{\"ci"),
        Event::CallEnd {
            index: 1,
            intact: false,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_begin_grow_and_end_in_order() {
        let mut items = Items::default();
        let mut changes = Vec::new();
        for event in example() {
            items.apply(event, &mut changes);
        }
        items.finish(&mut changes);
        let grow = |at, text: &str| Change::Grow(at, text.into());
        assert_eq!(
            changes,
            [
                Change::Begin(0),
                grow(0, "Let "),
                grow(0, "me see."),
                Change::End(0),
                Change::Begin(1),
                grow(1, "I ask."),
                Change::End(1),
                Change::Begin(2),
                grow(2, "{\"city\":"),
                grow(2, " \"Oslo\"}"),
                Change::End(2),
                Change::Begin(3),
                grow(3, "{\"ci"),
                Change::End(3),
            ]
        );
        assert!(items.has_calls());
        let ends: Vec<_> = items.all().iter().map(|item| item.end).collect();
        assert_eq!(ends[2..], [ItemEnd::Complete, ItemEnd::Broken]);
    }

    #[test]
    fn empty_texts_and_arguments_without_a_call_make_no_items() {
        let mut items = Items::default();
        let mut changes = Vec::new();
        items.apply(Event::Text(String::new()), &mut changes);
        let stray = Event::CallArguments {
            index: 0,
            delta: "{}".into(),
        };
        items.apply(stray, &mut changes);
        items.finish(&mut changes);
        assert!(changes.is_empty() && items.all().is_empty());
    }
}
