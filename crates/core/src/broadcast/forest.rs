//! Trees of receivers: one for every root, or one that all roots share.

use super::{ForestError, Members};

/// A node that has children: the root of a tree, or a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Parent {
    /// The shard itself.
    Root,
    /// The receiver of this number, which relays.
    Receiver(usize),
}

/// [`Parent::Root`] in a list of numbers.
const ROOT: u32 = u32::MAX;

impl Parent {
    fn of(number: u32) -> Parent {
        if number == ROOT { Parent::Root } else { Parent::Receiver(number as usize) }
    }

    fn number(self) -> u32 {
        match self {
            Parent::Root => ROOT,
            Parent::Receiver(receiver) => u32::try_from(receiver).unwrap_or(ROOT - 1),
        }
    }
}

/// A tree of all receivers below one root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    parents: Vec<u32>,
    /// The children of all nodes, those of a node together and ascending: the root's, then those of receiver 0, and so on.
    children: Vec<u32>,
    /// Where a node's children end; the root's first.
    ends: Vec<u32>,
    depths: Vec<u32>,
}

impl Tree {
    /// The tree in which receivers have these parents, in their order. The error says why it is no tree.
    pub fn new(parents: impl IntoIterator<Item = Parent>) -> Result<Tree, String> {
        let parents: Vec<u32> = parents.into_iter().map(Parent::number).collect();
        let count = parents.len();
        if let Some(receiver) =
            (0..count).find(|&receiver| parents[receiver] != ROOT && parents[receiver] as usize >= count)
        {
            let parent = parents[receiver];
            return Err(format!("receiver {receiver} has parent {parent}, and there are {count} receivers"));
        }
        let mut ends = vec![0u32; count + 2];
        let place = |parent: u32| if parent == ROOT { 0 } else { parent as usize + 1 };
        parents.iter().for_each(|&parent| ends[place(parent) + 1] += 1);
        (0..count + 1).for_each(|node| ends[node + 1] += ends[node]);
        let mut children = vec![0u32; count];
        for (receiver, &parent) in (0u32..).zip(&parents) {
            // Each counts up to where the next one begins.
            let next = &mut ends[place(parent)];
            children[*next as usize] = receiver;
            *next += 1;
        }
        ends.truncate(count + 1);
        let mut tree = Tree { parents, children, ends, depths: vec![0; count] };
        tree.measure()?;
        Ok(tree)
    }

    /// Walks down from the root. Receivers that are not met then are on a cycle, or below one.
    fn measure(&mut self) -> Result<(), String> {
        let mut level: Vec<u32> = self.children_of(Parent::Root).to_vec();
        let (mut depth, mut met) = (0, 0);
        while !level.is_empty() {
            depth += 1;
            met += level.len();
            level.iter().for_each(|&receiver| self.depths[receiver as usize] = depth);
            level = level
                .iter()
                .flat_map(|&receiver| self.children_of(Parent::Receiver(receiver as usize)))
                .copied()
                .collect();
        }
        match self.depths.iter().position(|&depth| depth == 0) {
            Some(receiver) if met < self.parents.len() => {
                Err(format!("no path from the root leads to receiver {receiver}"))
            }
            _ => Ok(()),
        }
    }

    /// Number of receivers.
    pub fn receivers(&self) -> usize {
        self.parents.len()
    }

    /// From where a receiver takes the stream.
    pub fn parent(&self, receiver: usize) -> Parent {
        Parent::of(self.parents[receiver])
    }

    /// The receivers that take it from this node, ascending.
    pub fn children(&self, node: Parent) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.children_of(node).iter().map(|&child| child as usize)
    }

    /// Hops from the root to a receiver, at least 1.
    pub fn depth_of(&self, receiver: usize) -> usize {
        self.depths[receiver] as usize
    }

    /// The most hops to any receiver; 0 where there is none.
    pub fn depth(&self) -> usize {
        self.depths.iter().max().map_or(0, |&depth| depth as usize)
    }

    /// The most children of any receiver.
    pub fn degree(&self) -> usize {
        let of = |receiver| self.children_of(Parent::Receiver(receiver)).len();
        (0..self.receivers()).map(of).max().unwrap_or(0)
    }

    /// The receivers without children.
    pub fn leaves(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.receivers()).filter(|&receiver| self.children_of(Parent::Receiver(receiver)).is_empty())
    }

    fn children_of(&self, node: Parent) -> &[u32] {
        let node = match node {
            Parent::Root => 0,
            Parent::Receiver(receiver) => receiver + 1,
        };
        let start = if node == 0 { 0 } else { self.ends[node - 1] };
        &self.children[start as usize..self.ends[node] as usize]
    }
}

/// How far a forest is from the best one there is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// Its cost, in the unit of [`Costs`](super::Costs).
    pub cost: f64,
    /// No forest within the same bounds costs less.
    pub bound: f64,
}

impl Quality {
    /// Cost over bound, less one: 0 for a forest that is known to be the best.
    pub fn distance(&self) -> f64 {
        if self.cost <= self.bound { 0.0 } else { self.cost / self.bound - 1.0 }
    }
}

/// A tree for every root.
#[derive(Debug, Clone, PartialEq)]
pub struct Forest {
    /// One for every root, or one for all.
    trees: Vec<Tree>,
    roots: usize,
    quality: Option<Quality>,
}

impl Forest {
    /// The same tree for all of `roots` roots.
    pub fn shared(tree: Tree, roots: usize) -> Forest {
        Forest { trees: vec![tree], roots, quality: None }
    }

    /// A tree for every root, in the order of the roots.
    pub fn apart(trees: Vec<Tree>) -> Forest {
        Forest { roots: trees.len(), trees, quality: None }
    }

    /// The same, with its distance from the best.
    pub fn with_quality(self, quality: Quality) -> Forest {
        Forest { quality: Some(quality), ..self }
    }

    /// Number of roots.
    pub fn roots(&self) -> usize {
        self.roots
    }

    /// Whether all roots have the same tree.
    pub fn is_shared(&self) -> bool {
        self.trees.len() == 1
    }

    /// The tree of a root.
    pub fn tree(&self, root: usize) -> &Tree {
        &self.trees[if self.is_shared() { 0 } else { root }]
    }

    /// From where a receiver takes the stream of a root.
    pub fn parent(&self, root: usize, receiver: usize) -> Parent {
        self.tree(root).parent(receiver)
    }

    /// The receivers that take the stream of a root from this node, ascending.
    pub fn children(&self, root: usize, node: Parent) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.tree(root).children(node)
    }

    /// The most hops from a root to a receiver.
    pub fn depth(&self) -> usize {
        self.trees.iter().map(Tree::depth).max().unwrap_or(0)
    }

    /// Children of a receiver in the trees of all roots together: how often it sends what it receives from one root.
    pub fn relayed(&self, receiver: usize) -> usize {
        (0..self.roots).map(|root| self.children(root, Parent::Receiver(receiver)).len()).sum()
    }

    /// Distance from the best forest there is, where the choice looks for the best.
    pub fn quality(&self) -> Option<Quality> {
        self.quality
    }

    /// Whether these are trees of these members: one for every root, with every receiver in it, and no children below a
    /// receiver that cannot relay.
    pub fn check(&self, members: &Members<'_>) -> Result<(), ForestError> {
        if self.roots != members.roots.len() {
            let why = format!("the forest has {} roots, and there are {}", self.roots, members.roots.len());
            return Err(ForestError::NoTree { root: 0, why });
        }
        for (root, tree) in self.trees.iter().enumerate() {
            let fault = |why| Err(ForestError::NoTree { root, why });
            if tree.receivers() != members.receivers.len() {
                let (known, count) = (tree.receivers(), members.receivers.len());
                return fault(format!("it has {known} receivers, and there are {count}"));
            }
            let has_children = |&receiver: &usize| tree.children(Parent::Receiver(receiver)).len() > 0;
            let cannot = |receiver: &usize| !members.receivers[*receiver].can_relay;
            if let Some(receiver) = (0..tree.receivers()).filter(cannot).find(has_children) {
                return fault(format!("receiver {receiver} has children and cannot relay"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broadcast::{Receiver, Topology};

    const R: Parent = Parent::Root;

    fn of(receiver: usize) -> Parent {
        Parent::Receiver(receiver)
    }

    #[test]
    fn a_tree_knows_parents_children_and_depths() {
        let tree = Tree::new([of(2), R, R, of(0), of(2)]).unwrap();
        let children = |node| tree.children(node).collect::<Vec<_>>();
        assert_eq!(children(R), [1, 2]);
        assert_eq!(
            [0, 1, 2, 3, 4].map(|node| children(of(node))),
            [vec![3], vec![], vec![0, 4], vec![], vec![]]
        );
        assert_eq!([0, 1, 2, 3, 4].map(|receiver| tree.depth_of(receiver)), [2, 1, 1, 3, 2]);
        assert_eq!((tree.depth(), tree.degree(), tree.receivers()), (3, 2, 5));
        assert_eq!(tree.leaves().collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!([0, 1].map(|receiver| tree.parent(receiver)), [of(2), R]);
        let none = Tree::new([]).unwrap();
        assert_eq!((none.depth(), none.degree(), none.children(R).len()), (0, 0, 0));
    }

    #[test]
    fn cycles_and_strangers_are_no_parents() {
        let why = |parents: &[Parent]| Tree::new(parents.iter().copied()).unwrap_err();
        assert_eq!(why(&[R, of(2), of(1)]), "no path from the root leads to receiver 1");
        assert_eq!(why(&[of(0)]), "no path from the root leads to receiver 0");
        assert_eq!(why(&[R, of(2)]), "receiver 1 has parent 2, and there are 2 receivers");
        assert!(why(&[R, of(usize::MAX)]).contains("and there are 2 receivers"));
    }

    #[test]
    fn relayed_children_are_counted_over_all_roots() {
        let tree = |parents: [Parent; 2]| Tree::new(parents).unwrap();
        let (one, other) = (tree([R, of(0)]), tree([of(1), R]));
        let apart = Forest::apart(vec![one.clone(), other, one.clone()]);
        assert_eq!([0, 1].map(|receiver| apart.relayed(receiver)), [2, 1]);
        assert_eq!((apart.parent(0, 1), apart.parent(1, 1), apart.roots()), (of(0), R, 3));
        let shared = Forest::shared(one, 3);
        assert_eq!([0, 1].map(|receiver| shared.relayed(receiver)), [3, 0]);
        assert_eq!((shared.parent(2, 1), shared.depth()), (of(0), 2));
    }

    #[test]
    fn a_forest_of_other_members_is_refused() {
        let topology = Topology::default();
        let site = topology.site("a");
        let receivers = [true, false, true].map(|can_relay| Receiver { site, can_relay });
        let members = Members { roots: &[site, site], receivers: &receivers, topology: &topology };
        let check = |parents: &[Parent], roots| {
            let tree = Tree::new(parents.iter().copied()).unwrap();
            Forest::shared(tree, roots).check(&members).map_err(|error| error.to_string())
        };
        assert_eq!(check(&[R, of(0), of(0)], 2), Ok(()));
        let refused = |parents: &[Parent], roots| check(parents, roots).unwrap_err();
        assert_eq!(refused(&[R, R, of(1)], 2), "tree of root 0: receiver 1 has children and cannot relay");
        assert_eq!(refused(&[R, R], 2), "tree of root 0: it has 2 receivers, and there are 3");
        assert_eq!(refused(&[R, R, R], 1), "tree of root 0: the forest has 1 roots, and there are 2");
    }

    #[test]
    fn distance_is_nothing_at_the_bound() {
        assert_eq!(Quality { cost: 2.0, bound: 2.0 }.distance(), 0.0);
        assert_eq!(Quality { cost: 3.0, bound: 2.0 }.distance(), 0.5);
        assert_eq!(Quality { cost: 0.0, bound: 0.0 }.distance(), 0.0);
    }
}
