//! The result of parsing: what a client is to see of an output.

/// A part of an output. Adjacent parts of one kind belong together, wherever they were cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text for the user.
    Text(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A call begins. It comes before all fragments of the call's arguments.
    CallStart {
        /// The number of the call in this output, from zero.
        index: u32,
        /// The model's own name of the call, where its format has one. Otherwise the caller invents one.
        id: Option<String>,
        /// The name of the tool.
        name: String,
    },
    /// The next fragment of a call's arguments. All fragments together are JSON text.
    CallArguments {
        /// The number of the call.
        index: u32,
        /// The fragment, which is seldom JSON on its own.
        delta: String,
    },
    /// A call ends.
    CallEnd {
        /// The number of the call.
        index: u32,
        /// Whether the arguments are complete and valid JSON. It is false where the output ended within the call, or
        /// where the model made a mistake after its arguments had begun to come.
        intact: bool,
    },
}

impl Event {
    /// Appends an event to a list. A fragment joins the last event where that continues it.
    pub fn append(self, events: &mut Vec<Event>) {
        match (events.last_mut(), self) {
            (Some(Event::Text(last)), Event::Text(more))
            | (Some(Event::Reasoning(last)), Event::Reasoning(more)) => last.push_str(&more),
            (
                Some(Event::CallArguments { index: same, delta }),
                Event::CallArguments { index, delta: more },
            ) if *same == index => delta.push_str(&more),
            (_, event) => events.push(event),
        }
    }
}

/// Numbers of one output, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls that came out, broken ones included.
    pub calls: u32,
    /// Attempts at a call that could not be parsed: they came out as text, or as a call that is not intact.
    pub failures: u32,
    /// Calls after the first that were left out, because parallel calls are not wanted.
    pub dropped: u32,
}
