//! The continuations of a node, counted over the live part and the segments together.

use super::{Continuation, HitPosition, LiveNode, Node, Search, Sighting, SightingPlace};
use crate::Token;
use crate::live_part::{DocumentPosition, StateId};
use crate::segment::SEPARATOR;

impl Search<'_> {
    /// Replaces the content of `into` with all continuations, ordered by descending count and then by token. Returns
    /// the sum of their counts.
    pub fn continuations(&mut self, node: &Node, into: &mut Vec<Continuation>) -> u64 {
        self.continuations_where(node, |_, _| true, into)
    }

    /// As [`continuations`](Self::continuations), but collects only those for which `keep(count, total)` holds. The
    /// returned sum is over all of them.
    pub fn continuations_where(
        &mut self,
        node: &Node,
        keep: impl Fn(u32, u64) -> bool,
        into: &mut Vec<Continuation>,
    ) -> u64 {
        into.clear();
        let sealed = self.group(node, into);
        let total = match node.live {
            None => sealed,
            Some(LiveNode::Text(place)) => sealed + self.add_text(node, place, into),
            Some(LiveNode::State(state)) => self.add_state(node, state, sealed, &keep, into),
        };
        into.retain(|next| keep(next.count, total));
        if into.len() > 1 {
            into.sort_unstable_by_key(|next| (std::cmp::Reverse(next.count), next.token));
        }
        total
    }

    /// Collects the sealed continuations, ordered by token. Sorts the occurrences so that those of each token are
    /// neighbours.
    fn group(&mut self, node: &Node, into: &mut Vec<Continuation>) -> u64 {
        let (start, end) = node.hits;
        let hits = &mut self.hits[start as usize..end as usize];
        let Some(first) = hits.first().copied() else {
            return 0;
        };
        let mut same = true;
        let mut first_token = SEPARATOR;
        for (at, hit) in hits.iter_mut().enumerate() {
            let position = match hit.place {
                HitPosition::Text(position) => Some(position),
                HitPosition::Entry(_) if node.depth == 0 => None,
                HitPosition::Entry(entry) => self.segments.after(hit.segment, entry),
            };
            if let Some(position) = position {
                hit.place = HitPosition::Text(position);
                let text = self.segments.text(hit.segment);
                let token = text.get(position as usize + node.depth as usize);
                hit.token = token.copied().unwrap_or(SEPARATOR);
            }
            if at == 0 {
                first_token = hit.token;
            }
            same &= hit.token == first_token;
        }
        if !same {
            hits.sort_unstable_by_key(|hit| hit.token);
        }
        let mut total = 0;
        let mut at = start;
        for group in hits.chunk_by(|one, next| one.token == next.token) {
            let hits = (at, at + group.len() as u32);
            at = hits.1;
            let first = group.first().copied().unwrap_or(first);
            // These occurrences are at the end of their documents.
            if first.token == SEPARATOR {
                continue;
            }
            let count = group.iter().map(|hit| hit.weight).sum::<u32>();
            total += u64::from(count);
            into.push(Continuation {
                token: first.token,
                count,
                node: Node {
                    live: None,
                    hits,
                    depth: node.depth + 1,
                },
                sighting: Sighting(match (first.segment, first.place) {
                    (segment, HitPosition::Text(position)) => SightingPlace::Sealed {
                        segment,
                        position: position + node.depth,
                    },
                    (segment, HitPosition::Entry(entry)) => SightingPlace::After { segment, entry },
                }),
            });
        }
        total
    }

    /// Adds the token that follows the only live occurrence.
    fn add_text(&self, node: &Node, place: DocumentPosition, into: &mut Vec<Continuation>) -> u64 {
        let document = &self.live_part.documents[place.slot as usize];
        let Some((position, token)) = document.after(place.position) else {
            return 0;
        };
        let place = DocumentPosition { position, ..place };
        let sealed = into.len();
        add(node, token, 1, LiveNode::Text(place), place, sealed, into);
        1
    }

    /// Adds the continuations in the live part to `sealed` sealed ones. Returns the sum of both.
    fn add_state(
        &mut self,
        node: &Node,
        state: StateId,
        sealed: u64,
        keep: &impl Fn(u32, u64) -> bool,
        into: &mut Vec<Continuation>,
    ) -> u64 {
        let live = self.live_part;
        let fan_out_max = if sealed == 0 {
            self.limits.fan_out_max
        } else {
            self.limits.fan_out_max.min(self.limits.samples_max)
        };
        if live.automaton.fan_out(state) > fan_out_max {
            return sealed;
        }
        self.fan.clear();
        self.fan.extend(live.transitions(state));
        let counts = self.fan.iter().map(|(_, _, count)| u64::from(*count));
        let total = sealed + counts.sum::<u64>();
        let groups = into.len();
        for &(token, target, count) in &self.fan {
            // A token that the live part does not offer may be offered by a segment, so its state is noted there.
            if groups == 0 && (count == 0 || !keep(count, total)) {
                continue;
            }
            let place = live.automaton.state(target).place;
            let at = if count > 0 && live.automaton.occurs_once(target) {
                LiveNode::Text(place)
            } else {
                LiveNode::State(target)
            };
            add(node, token, count, at, place, groups, into);
        }
        total
    }
}

/// Adds a live continuation to the sealed one of the same token. The first `groups` continuations are the sealed
/// ones, ordered by token.
fn add(
    node: &Node,
    token: Token,
    count: u32,
    at: LiveNode,
    place: DocumentPosition,
    groups: usize,
    into: &mut Vec<Continuation>,
) {
    match into[..groups].binary_search_by_key(&token, |next| next.token) {
        Ok(same) => {
            let next = &mut into[same];
            next.count = next.count.saturating_add(count);
            next.node.live = Some(at);
            if count > 0 {
                next.sighting = Sighting(SightingPlace::Live(place));
            }
        }
        Err(_) if count == 0 => {}
        Err(_) => into.push(Continuation {
            token,
            count,
            node: Node {
                live: Some(at),
                hits: (0, 0),
                depth: node.depth + 1,
            },
            sighting: Sighting(SightingPlace::Live(place)),
        }),
    }
}
