//! A line that finds its first requests with a small enough need, without a look at those before them.
//!
//! Where room in the KV caches is scarce, most waiting requests fit nowhere. A scan would pass over all of them for
//! each slot, and a scan with a bound would never find those that fit beyond it.
//!
//! This is a treap: a search tree by key, and a heap by random priorities, so that it is balanced on average. Each
//! node also has the smallest need of its subtree, and a search skips every subtree in which nothing fits. So
//! insertion, removal and each request that is found take O(log n), and a line in which nothing fits takes O(1).

/// No node.
const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node<K> {
    key: K,
    need: u64,
    /// The smallest need of its subtree.
    need_min: u64,
    /// At least those of its subtree.
    priority: u64,
    left: u32,
    right: u32,
}

/// Keys in order, each with a need.
#[derive(Debug)]
pub(super) struct FitTree<K> {
    nodes: Vec<Node<K>>,
    vacant: Vec<u32>,
    root: u32,
    /// The state of the generator of priorities.
    drawn: u64,
}

impl<K> Default for FitTree<K> {
    fn default() -> Self {
        FitTree {
            nodes: Vec::new(),
            vacant: Vec::new(),
            root: NIL,
            drawn: 0,
        }
    }
}

impl<K: Copy + Ord> FitTree<K> {
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// The first key.
    pub(super) fn first(&self) -> Option<K> {
        let mut first = self.node(self.root)?;
        while let Some(node) = self.node(first.left) {
            first = node;
        }
        Some(first.key)
    }

    /// Adds a key that is not there yet.
    pub(super) fn insert(&mut self, key: K, need: u64) {
        let node = Node {
            key,
            need,
            need_min: need,
            priority: self.draw(),
            left: NIL,
            right: NIL,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        self.root = self.insert_into(self.root, index);
    }

    /// Removes a key, if it is there.
    pub(super) fn remove(&mut self, key: K) {
        self.root = self.remove_from(self.root, key);
        if self.len() == 0 {
            // A burst of requests does not keep its memory.
            *self = FitTree::default();
        }
    }

    /// The keys whose needs are at most `room`, in order.
    pub(super) fn fitting(&self, room: u64) -> Fitting<'_, K> {
        let mut fitting = Fitting {
            tree: self,
            room,
            path: Vec::new(),
        };
        fitting.descend(self.root);
        fitting
    }

    /// The next number of a sequence that has no pattern (splitmix64).
    fn draw(&mut self) -> u64 {
        self.drawn = self.drawn.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.drawn ^ (self.drawn >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn node(&self, index: u32) -> Option<&Node<K>> {
        self.nodes.get(index as usize)
    }

    fn need_min(&self, index: u32) -> u64 {
        self.node(index).map_or(u64::MAX, |node| node.need_min)
    }

    /// Computes the smallest need of a subtree from its parts.
    fn renew(&mut self, index: u32) {
        let node = self.nodes[index as usize];
        let below = self.need_min(node.left).min(self.need_min(node.right));
        self.nodes[index as usize].need_min = node.need.min(below);
    }

    /// Adds a node to a subtree. Returns its new root.
    fn insert_into(&mut self, root: u32, index: u32) -> u32 {
        let new = self.nodes[index as usize];
        let Some(top) = self.node(root).copied() else {
            return index;
        };
        if new.priority > top.priority {
            let (left, right) = self.split(root, new.key);
            let node = &mut self.nodes[index as usize];
            (node.left, node.right) = (left, right);
            self.renew(index);
            return index;
        }
        if new.key < top.key {
            let left = self.insert_into(top.left, index);
            self.nodes[root as usize].left = left;
        } else {
            let right = self.insert_into(top.right, index);
            self.nodes[root as usize].right = right;
        }
        self.renew(root);
        root
    }

    /// Divides a subtree into the keys before `key` and the others.
    fn split(&mut self, root: u32, key: K) -> (u32, u32) {
        let Some(top) = self.node(root).copied() else {
            return (NIL, NIL);
        };
        let parts = if top.key < key {
            let (before, after) = self.split(top.right, key);
            self.nodes[root as usize].right = before;
            (root, after)
        } else {
            let (before, after) = self.split(top.left, key);
            self.nodes[root as usize].left = after;
            (before, root)
        };
        self.renew(root);
        parts
    }

    /// Removes a key from a subtree. Returns its new root.
    fn remove_from(&mut self, root: u32, key: K) -> u32 {
        let Some(top) = self.node(root).copied() else {
            return NIL;
        };
        if key == top.key {
            self.vacant.push(root);
            return self.merge(top.left, top.right);
        }
        if key < top.key {
            let left = self.remove_from(top.left, key);
            self.nodes[root as usize].left = left;
        } else {
            let right = self.remove_from(top.right, key);
            self.nodes[root as usize].right = right;
        }
        self.renew(root);
        root
    }

    /// Joins two subtrees, all of whose keys are in order.
    fn merge(&mut self, before: u32, after: u32) -> u32 {
        let (Some(left), Some(right)) = (self.node(before).copied(), self.node(after).copied())
        else {
            return before.min(after);
        };
        let root = if left.priority > right.priority {
            let joined = self.merge(left.right, after);
            self.nodes[before as usize].right = joined;
            before
        } else {
            let joined = self.merge(before, right.left);
            self.nodes[after as usize].left = joined;
            after
        };
        self.renew(root);
        root
    }
}

/// Keys that fit, in order.
#[derive(Debug)]
pub(super) struct Fitting<'a, K> {
    tree: &'a FitTree<K>,
    room: u64,
    /// The nodes whose own key and right subtree come next, the nearest last.
    path: Vec<u32>,
}

impl<K: Copy + Ord> Fitting<'_, K> {
    /// Goes to the first key of a subtree.
    fn descend(&mut self, mut index: u32) {
        while self.tree.need_min(index) <= self.room
            && let Some(node) = self.tree.node(index)
        {
            self.path.push(index);
            index = node.left;
        }
    }
}

impl<K: Copy + Ord> Iterator for Fitting<'_, K> {
    type Item = K;

    fn next(&mut self) -> Option<K> {
        while let Some(index) = self.path.pop() {
            let node = *self.tree.node(index)?;
            self.descend(node.right);
            if node.need <= self.room {
                return Some(node.key);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_finds_what_a_scan_finds(
            changes in proptest::collection::vec((any::<bool>(), 0..60u32, 0..20u64), 0..200),
            room in 0..20u64,
        ) {
            let (mut tree, mut scan) = (FitTree::default(), BTreeMap::new());
            for (adds, key, need) in changes {
                tree.remove(key);
                scan.remove(&key);
                if adds {
                    tree.insert(key, need);
                    scan.insert(key, need);
                }
                prop_assert_eq!(tree.len(), scan.len());
                prop_assert_eq!(tree.first(), scan.keys().next().copied());
                let fits = scan.iter().filter(|(_, need)| **need <= room);
                let fits: Vec<u32> = fits.map(|(key, _)| *key).collect();
                prop_assert_eq!(tree.fitting(room).collect::<Vec<_>>(), fits);
            }
        }
    }

    #[test]
    fn a_long_line_is_not_deep_and_what_fits_nowhere_is_not_looked_at() {
        let mut tree = FitTree::default();
        for key in 0..100_000u32 {
            tree.insert(key, 100 + u64::from(key == 70_000));
        }
        assert_eq!(tree.fitting(99).path.len(), 0);
        assert!(tree.fitting(u64::MAX).path.len() < 64);
        for key in 0..70_000 {
            tree.remove(key);
        }
        assert_eq!(tree.first(), Some(70_000));
        assert_eq!(tree.fitting(100).next(), Some(70_001));
        for key in 70_000..100_000 {
            tree.remove(key);
        }
        assert_eq!((tree.len(), tree.nodes.capacity()), (0, 0));
    }
}
