//! What follows a node: tokens of the live part and of segments, counted together.

use super::{At, Continuation, HitPlace, Node, Search, Seen, Sighting};
use crate::Token;
use crate::live::automaton::Place;
use crate::live::edges::StateId;
use crate::segment::SEPARATOR;

impl Search<'_> {
    /// Replaces the content of `into` by all continuations, most frequent first and then by token. Returns
    /// the sum of their counts.
    pub fn continuations(&mut self, node: &Node, into: &mut Vec<Continuation>) -> u64 {
        self.continuations_where(node, |_, _| true, into)
    }

    /// As [`continuations`](Self::continuations), but collects only those for which `keep(count, total)`
    /// holds; the returned total is that of all.
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
            Some(At::Text(place)) => sealed + self.add_text(node, place, into),
            Some(At::State(state)) => self.add_state(node, state, sealed, &keep, into),
        };
        into.retain(|next| keep(next.count, total));
        if into.len() > 1 {
            into.sort_unstable_by_key(|next| (std::cmp::Reverse(next.count), next.token));
        }
        total
    }

    /// The sealed continuations, by token. Brings the occurrences of each together.
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
                HitPlace::Text(position) => Some(position),
                HitPlace::Entry(_) if node.depth == 0 => None,
                HitPlace::Entry(entry) => self.probes.after(hit.segment, entry),
            };
            if let Some(position) = position {
                hit.place = HitPlace::Text(position);
                let text = self.probes.text(hit.segment);
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
            // The document ends there.
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
                    (segment, HitPlace::Text(position)) => Seen::Sealed {
                        segment,
                        position: position + node.depth,
                    },
                    (segment, HitPlace::Entry(entry)) => Seen::After { segment, entry },
                }),
            });
        }
        total
    }

    /// Adds what follows the only live occurrence.
    fn add_text(&self, node: &Node, place: Place, into: &mut Vec<Continuation>) -> u64 {
        let document = &self.index.live.documents[place.slot as usize];
        let Some((position, token)) = document.after(place.position) else {
            return 0;
        };
        let place = Place { position, ..place };
        let sealed = into.len();
        add(node, token, 1, At::Text(place), place, sealed, into);
        1
    }

    /// Adds what follows in the live part to `sealed` occurrences; returns the sum of both.
    fn add_state(
        &self,
        node: &Node,
        state: StateId,
        sealed: u64,
        keep: &impl Fn(u32, u64) -> bool,
        into: &mut Vec<Continuation>,
    ) -> u64 {
        let live = &self.index.live;
        let fan_out_max = if sealed == 0 {
            self.limits.fan_out_max
        } else {
            self.limits.fan_out_max.min(self.limits.samples_max)
        };
        if live.automaton.fan_out(state) > fan_out_max {
            return sealed;
        }
        let counts = live
            .transitions(state)
            .map(|(_, _, count)| u64::from(count));
        let total = sealed + counts.sum::<u64>();
        let groups = into.len();
        for (token, target, count) in live.transitions(state) {
            // What is not offered here may be by a segment, and followed from there.
            if groups == 0 && (count == 0 || !keep(count, total)) {
                continue;
            }
            let place = live.automaton.state(target).place;
            let at = if count > 0 && live.automaton.occurs_once(target) {
                At::Text(place)
            } else {
                At::State(target)
            };
            add(node, token, count, at, place, groups, into);
        }
        total
    }
}

/// Adds a live continuation to that of the same token among the first `groups`, which are ordered by token.
fn add(
    node: &Node,
    token: Token,
    count: u32,
    at: At,
    place: Place,
    groups: usize,
    into: &mut Vec<Continuation>,
) {
    match into[..groups].binary_search_by_key(&token, |next| next.token) {
        Ok(same) => {
            let next = &mut into[same];
            next.count = next.count.saturating_add(count);
            next.node.live = Some(at);
            if count > 0 {
                next.sighting = Sighting(Seen::Live(place));
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
            sighting: Sighting(Seen::Live(place)),
        }),
    }
}
