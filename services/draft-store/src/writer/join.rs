//! How a document of this replica and a part that came by the stream become one. A pure function.
//!
//! The states of a document are in one order, and the larger of two states wins. So replicas agree whatever order
//! they learnt the states in, and repetitions are harmless. The epoch counts first, then the *revision*: how often
//! the text was corrected within the epoch, which only a late update does (`placement.rs`). Then comes the text
//! as in a dictionary, so that a text that goes on is larger than its beginning, and at last the finish reason.
//!
//! A long document comes in parts. The order by dictionary makes this exact: a text that differs from the beginning
//! of a document is larger or smaller than the whole document, too. A part names the checksum of what is before it,
//! so a part that does not follow this replica's text is told apart.
//!
//! Applying updates in the order of the stream was rejected. A replica answers its callers before it knows where in
//! the stream their updates will be, so it would have to take text back.

use refrain_protocol::TokenId;

use crate::message::text_checksum;

/// The version of a text: its epoch and its revision.
pub(super) type TextVersion = (u64, u32);

/// A document as this replica has it.
pub(super) struct LocalText<'a> {
    pub(super) version: TextVersion,
    pub(super) text: &'a [TokenId],
    pub(super) finish: u8,
}

/// A part of a document from the stream.
pub(super) struct ReceivedText<'a> {
    pub(super) version: TextVersion,
    pub(super) start: u32,
    /// Checksum of the text before `start`.
    pub(super) before: u64,
    pub(super) tokens: &'a [TokenId],
    pub(super) finish: u8,
}

/// The effect of a part on a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joined {
    /// The text before the part is missing: the document was removed, or it is another text.
    Gap,
    /// The document is at least as large.
    Nothing,
    /// The text stays, and the finish reason changes.
    Finish,
    /// The text is cut to `to`, and the tokens of the part from `skip` on are added.
    Write { to: u32, skip: usize },
}

/// Decides what a part does. `local` is `None` for an unknown document.
pub(super) fn join(local: Option<LocalText<'_>>, received: &ReceivedText<'_>) -> Joined {
    let start = received.start as usize;
    let Some(local) = local else {
        return match start {
            0 => Joined::Write { to: 0, skip: 0 },
            _ => Joined::Gap,
        };
    };
    if received.version < local.version {
        return Joined::Nothing;
    }
    if received.version > local.version {
        if start > 0 {
            return Joined::Gap;
        }
        let common = common(local.text, received.tokens);
        return Joined::Write {
            to: common as u32,
            skip: common,
        };
    }
    let Some((before, rest)) = local.text.split_at_checked(start) else {
        return Joined::Gap;
    };
    if start > 0 && text_checksum(before) != received.before {
        return Joined::Gap;
    }
    let at = common(rest, received.tokens);
    match (rest.get(at), received.tokens.get(at)) {
        (None, None) if received.finish > local.finish => Joined::Finish,
        (None, None) | (Some(_), None) => Joined::Nothing,
        (Some(ours), Some(theirs)) if ours > theirs => Joined::Nothing,
        (_, Some(_)) => Joined::Write {
            to: (start + at) as u32,
            skip: at,
        },
    }
}

/// Length of the common beginning.
fn common(ours: &[TokenId], theirs: &[TokenId]) -> usize {
    let pairs = ours.iter().zip(theirs);
    pairs.take_while(|(ours, theirs)| ours == theirs).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A whole document.
    type State = (u64, u32, Vec<TokenId>, u8);

    fn apply(local: &mut Option<State>, part: &ReceivedText<'_>) {
        let known = local
            .as_ref()
            .map(|(epoch, revision, text, finish)| LocalText {
                version: (*epoch, *revision),
                text,
                finish: *finish,
            });
        match join(known, part) {
            Joined::Gap | Joined::Nothing => {}
            Joined::Finish => {
                if let Some(local) = local {
                    local.3 = part.finish;
                }
            }
            Joined::Write { to, skip } => {
                let mut text = local.take().map_or_else(Vec::new, |local| local.2);
                text.truncate(to as usize);
                text.extend_from_slice(&part.tokens[skip..]);
                *local = Some((part.version.0, part.version.1, text, part.finish));
            }
        }
    }

    /// Applies a state in parts of `size` tokens.
    fn apply_state(local: &mut Option<State>, state: &State, size: usize) {
        let (epoch, revision, text, finish) = state;
        let count = text.len().div_ceil(size).max(1);
        for at in 0..count {
            let (start, end) = (at * size, text.len().min((at + 1) * size));
            let part = ReceivedText {
                version: (*epoch, *revision),
                start: start as u32,
                before: text_checksum(&text[..start]),
                tokens: &text[start..end],
                finish: if at + 1 == count { *finish } else { 0 },
            };
            apply(local, &part);
        }
    }

    fn state() -> impl Strategy<Value = State> {
        let text = proptest::collection::vec(0u32..3, 0..9);
        (1u64..3, 0u32..2, text, 0u8..3)
    }

    proptest! {
        #[test]
        fn the_largest_state_wins_in_any_order_and_in_any_parts(
            states in proptest::collection::vec((state(), 1usize..5), 1..8),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut local = None;
            for at in order {
                let (state, size) = at.get(&states);
                apply_state(&mut local, state, *size);
            }
            for (state, size) in &states {
                apply_state(&mut local, state, *size);
            }
            prop_assert_eq!(local.as_ref(), states.iter().map(|(state, _)| state).max());
        }
    }

    #[test]
    fn a_part_that_follows_nothing_is_a_gap() {
        let part = ReceivedText {
            version: (1, 0),
            start: 2,
            before: text_checksum(&[1, 2]),
            tokens: &[3],
            finish: 1,
        };
        let local = |text| LocalText {
            version: (1, 0),
            text,
            finish: 0,
        };
        assert_eq!(join(None, &part), Joined::Gap);
        assert_eq!(join(Some(local(&[1])), &part), Joined::Gap);
        assert_eq!(join(Some(local(&[1, 9])), &part), Joined::Gap);
        let goes_on = Joined::Write { to: 2, skip: 0 };
        assert_eq!(join(Some(local(&[1, 2])), &part), goes_on);
    }
}
