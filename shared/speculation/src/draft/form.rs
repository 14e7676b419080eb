//! Drafts of an output that must have a form. Tokens that the form forbids are cut before they are verified, and
//! tokens that it forces are drafted: they are certain, whatever the model.

use refrain_suffix_index::Token;

use crate::candidate::{Candidate, DraftNode, DraftTree, Origin, Scope, Source};

/// The form of an output, at the end of the output so far.
pub trait Form {
    /// Goes on by a token. Returns whether the form allows it; if not, it stays where it is.
    fn enter(&mut self, token: Token) -> bool;

    /// Goes back by `count` tokens.
    fn leave(&mut self, count: usize);

    /// The tokens that the form forces from here on, at most `max` of them.
    fn forced(&mut self, max: usize) -> Vec<Token>;
}

/// Maximum number of ends of a draft behind which forced tokens are looked for, likeliest first. A look takes as long
/// as making a few masks.
const ENDS_MAX: usize = 4;

/// Maximum number of forced tokens behind one end.
const FORCED_BEHIND_MAX: usize = 16;

/// The draft `found` without what the form forbids, and with what it forces at the beginning and behind the ends; at
/// most `nodes_max` nodes, likeliest first. `None` if nothing is left.
pub fn within_form(
    found: Option<&Candidate>,
    nodes_max: usize,
    form: &mut impl Form,
) -> Option<Candidate> {
    let mut grown = Grown::default();
    let empty = DraftTree::default();
    let tree = found.map_or(&empty, |found| &found.tree);
    let place = grown.begin(tree, nodes_max, form);
    let entered = grown.nodes.len();
    if let Some(place) = place {
        grown.keep(tree, place, form);
    }
    grown.continue_ends(entered, nodes_max, form);
    form.leave(entered);
    let nodes = likeliest(grown.nodes, nodes_max);
    let is_forced = |node: &DraftNode| node.origin.source == Source::Grammar;
    match found.filter(|_| !nodes.iter().all(is_forced)) {
        Some(found) => Candidate::new(nodes, found.match_len, found.source, found.scope),
        None => Candidate::new(nodes, 0, Source::Grammar, Scope::Request),
    }
}

/// The nodes so far, parents before children.
#[derive(Default)]
struct Grown {
    nodes: Vec<DraftNode>,
}

impl Grown {
    fn force(&mut self, token: Token, parent: Option<u32>) -> u32 {
        let above = parent.map_or(1.0, |parent| self.nodes[parent as usize].probability);
        self.nodes.push(DraftNode {
            token,
            parent,
            probability: above,
            count: 0,
            match_len: 0,
            witnesses: None,
            origin: Origin {
                source: Source::Grammar,
                scope: Scope::Request,
                place: None,
            },
        });
        self.nodes.len() as u32 - 1
    }

    /// Drafts what is forced at the root, and stays behind it. Returns the node of `tree` there, of which `None` is
    /// the root; nothing if the tree has another text.
    #[allow(clippy::option_option, reason = "a place in a tree may be its root")]
    fn begin(
        &mut self,
        tree: &DraftTree,
        nodes_max: usize,
        form: &mut impl Form,
    ) -> Option<Option<u32>> {
        let mut place = Some(None);
        let mut parent = None;
        for token in form.forced(nodes_max) {
            if !form.enter(token) {
                break;
            }
            parent = Some(self.force(token, parent));
            place = place.and_then(|at| tree.child(at, token)).map(Some);
        }
        place
    }

    /// Keeps the nodes below a place of the tree that the form allows.
    fn keep(&mut self, tree: &DraftTree, place: Option<u32>, form: &mut impl Form) {
        let nodes = tree.nodes();
        let mut children: Vec<Vec<u32>> = vec![Vec::new(); nodes.len() + 1];
        for (node, parent) in nodes.iter().map(|node| node.parent).enumerate().rev() {
            children[parent.map_or(0, |parent| parent as usize + 1)].push(node as u32);
        }
        let below = |node: Option<u32>| &children[node.map_or(0, |node| node as usize + 1)];
        let reached = place.map_or(1.0, |place| nodes[place as usize].probability);
        let root = self.nodes.len().checked_sub(1).map(|last| last as u32);
        let mut depth = 0;
        let mut open: Vec<(u32, Option<u32>, usize)> =
            below(place).iter().map(|node| (*node, root, 0)).collect();
        while let Some((node, parent, above)) = open.pop() {
            form.leave(depth - above);
            depth = above;
            let drafted = &nodes[node as usize];
            if !form.enter(drafted.token) {
                continue;
            }
            depth += 1;
            self.nodes.push(DraftNode {
                parent,
                probability: (drafted.probability / reached).min(1.0),
                ..*drafted
            });
            let kept = self.nodes.len() as u32 - 1;
            open.extend(
                below(Some(node))
                    .iter()
                    .map(|child| (*child, Some(kept), depth)),
            );
        }
        form.leave(depth);
    }

    /// Drafts what is forced behind the likeliest ends. The form stands behind the first `entered` nodes.
    fn continue_ends(&mut self, entered: usize, nodes_max: usize, form: &mut impl Form) {
        let mut is_end = vec![true; self.nodes.len()];
        for parent in self.nodes.iter().filter_map(|node| node.parent) {
            is_end[parent as usize] = false;
        }
        let mut ends: Vec<u32> = (entered..self.nodes.len())
            .filter(|node| is_end[*node])
            .map(|node| node as u32)
            .collect();
        let probability = |node: &u32| self.nodes[*node as usize].probability;
        ends.sort_by(|left, right| probability(right).total_cmp(&probability(left)));
        for end in ends.into_iter().take(ENDS_MAX) {
            let mut path = Vec::new();
            let mut at = Some(end);
            while let Some(node) = at.filter(|node| *node as usize >= entered) {
                path.push(self.nodes[node as usize].token);
                at = self.nodes[node as usize].parent;
            }
            let reached = path
                .iter()
                .rev()
                .take_while(|token| form.enter(**token))
                .count();
            if reached == path.len() {
                let mut parent = Some(end);
                for token in form.forced(nodes_max.min(FORCED_BEHIND_MAX)) {
                    parent = Some(self.force(token, parent));
                }
            }
            form.leave(reached);
        }
    }
}

/// The `nodes_max` likeliest nodes, likeliest first. No node is likelier than its parent, which therefore stays
/// before it.
fn likeliest(nodes: Vec<DraftNode>, nodes_max: usize) -> Vec<DraftNode> {
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    let probability = |node: usize| nodes[node].probability;
    order.sort_by(|left, right| probability(*right).total_cmp(&probability(*left)));
    order.truncate(nodes_max);
    let mut places = vec![0u32; nodes.len()];
    for (place, node) in order.iter().enumerate() {
        places[*node] = place as u32;
    }
    let moved = |node: &usize| DraftNode {
        parent: nodes[*node].parent.map(|parent| places[parent as usize]),
        ..nodes[*node]
    };
    order.iter().map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the texts of a list, from which everything follows.
    struct Texts {
        texts: Vec<Vec<Token>>,
        at: Vec<Token>,
        looks: usize,
    }

    impl Texts {
        fn new(texts: &[&[Token]]) -> Self {
            Texts {
                texts: texts.iter().map(|text| text.to_vec()).collect(),
                at: Vec::new(),
                looks: 0,
            }
        }

        fn next(&self) -> Vec<Token> {
            let after = |text: &Vec<Token>| text.strip_prefix(&self.at[..])?.first().copied();
            let mut next: Vec<Token> = self.texts.iter().filter_map(after).collect();
            next.sort_unstable();
            next.dedup();
            next
        }
    }

    impl Form for Texts {
        fn enter(&mut self, token: Token) -> bool {
            let allowed = self.next().contains(&token);
            if allowed {
                self.at.push(token);
            }
            allowed
        }

        fn leave(&mut self, count: usize) {
            self.at.truncate(self.at.len() - count);
        }

        fn forced(&mut self, max: usize) -> Vec<Token> {
            self.looks += 1;
            let from = self.at.len();
            while let [only] = self.next()[..]
                && self.at.len() < from + max
            {
                self.at.push(only);
            }
            self.at.split_off(from)
        }
    }

    fn found(nodes: &[(Token, Option<u32>, f32)]) -> Candidate {
        let node = |(token, parent, probability): &(Token, Option<u32>, f32)| DraftNode {
            token: *token,
            parent: *parent,
            probability: *probability,
            count: 1,
            match_len: 1,
            witnesses: None,
            origin: Origin {
                source: Source::Suffix,
                scope: Scope::Tenant,
                place: None,
            },
        };
        let nodes = nodes.iter().map(node).collect();
        Candidate::new(nodes, 5, Source::Suffix, Scope::Tenant).unwrap()
    }

    /// `token: parent, probability, source` of each node.
    fn shown(candidate: &Candidate) -> Vec<String> {
        let node = |node: &DraftNode| {
            let parent = node.parent.map_or(-1, i64::from);
            let source = node.origin.source;
            format!("{}: {parent}, {}, {source:?}", node.token, node.probability)
        };
        candidate.tree.nodes().iter().map(node).collect()
    }

    #[test]
    fn forced_tokens_are_certain_and_end_where_there_is_a_choice() {
        let mut form = Texts::new(&[&[1, 2, 3, 4], &[1, 2, 5]]);
        let candidate = within_form(None, 9, &mut form).unwrap();
        assert_eq!(shown(&candidate), ["1: -1, 1, Grammar", "2: 0, 1, Grammar"]);
        assert_eq!((candidate.source, candidate.score), (Source::Grammar, 3.0));
        assert!(form.at.is_empty());
        assert_eq!(within_form(None, 1, &mut form).unwrap().tree.len(), 1);
        assert_eq!(within_form(None, 9, &mut Texts::new(&[&[1], &[2]])), None);
    }

    #[test]
    fn a_draft_is_cut_and_grown() {
        let mut form = Texts::new(&[&[1, 2, 3, 4, 6], &[1, 2, 5, 7, 7]]);
        let draft = found(&[
            (1, None, 0.5),
            (2, Some(0), 0.4),
            (9, None, 0.4),
            (3, Some(1), 0.2),
            (5, Some(1), 0.1),
            (8, Some(1), 0.1),
            (4, Some(3), 0.05),
        ]);
        let candidate = within_form(Some(&draft), 9, &mut form).unwrap();
        assert_eq!(
            shown(&candidate),
            [
                "1: -1, 1, Grammar",
                "2: 0, 1, Grammar",
                "3: 1, 0.5, Suffix",
                "5: 1, 0.25, Suffix",
                "7: 3, 0.25, Grammar",
                "7: 4, 0.25, Grammar",
                "4: 2, 0.125, Suffix",
                "6: 6, 0.125, Grammar",
            ]
        );
        assert_eq!((candidate.source, candidate.match_len), (Source::Suffix, 5));
        assert!(form.at.is_empty() && form.looks == 3);
        let short = within_form(Some(&draft), 3, &mut form).unwrap();
        assert_eq!(shown(&short), shown(&candidate)[..3]);
    }

    #[test]
    fn a_draft_that_is_forbidden_leaves_what_is_forced() {
        let mut form = Texts::new(&[&[1, 2]]);
        let candidate = within_form(Some(&found(&[(7, None, 0.9)])), 9, &mut form).unwrap();
        assert_eq!(shown(&candidate), ["1: -1, 1, Grammar", "2: 0, 1, Grammar"]);
        let mut free = Texts::new(&[&[1], &[2]]);
        assert_eq!(
            within_form(Some(&found(&[(7, None, 0.9)])), 9, &mut free),
            None
        );
    }
}
