//! Rotated trees: another arrangement of the same receivers for every root.
//!
//! In a tree of degree d only one receiver of d relays, and sends everything d times. Each root has a part of the parameters
//! only, so the receivers take turns: those that relay in one tree are leaves in the next (as in SplitStream, Castro et al.
//! 2003). Over all trees everybody sends about as much as it receives.

use super::{Broadcast, Forest, ForestError, Members, Parent, Site, Tree};
use crate::registry::{Entry, Param};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "rotated",
    about: "A tree for every server in which other receivers relay, so that each sends about as much as it receives.",
    params: &[Param { name: "degree", default: Some("2"), about: "Children of a receiver that relays." }],
    example: "rotated:degree=2",
    build: |spec| {
        let trees: Rotated = spec.config()?;
        spec.require(trees.degree >= 1, || "degree = 0: expected at least 1".into())?;
        Ok(Box::new(trees))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rotated {
    #[serde(default = "default_degree")]
    degree: u32,
}

fn default_degree() -> u32 {
    2
}

impl Broadcast for Rotated {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        Ok(rotated(members, self.degree as usize))
    }
}

/// The forest by default.
pub(super) fn by_default(members: &Members<'_>) -> Forest {
    rotated(members, default_degree() as usize)
}

fn rotated(members: &Members<'_>, degree: usize) -> Forest {
    // The roots of one of h hosts have a part of 1/h: such a host sends it h times while a receiver receives everything.
    let hosts: BTreeSet<u64> = members.roots.iter().map(|site| site.host).collect();
    let at_root = degree.max(hosts.len());
    let receivers = members.receivers.len();
    let relays: Vec<u32> = (0u32..)
        .zip(members.receivers)
        .filter(|(_, receiver)| receiver.can_relay)
        .map(|(number, _)| number)
        .collect();
    let below_relays = receivers.saturating_sub(at_root);
    let inner = below_relays.div_ceil(degree).min(relays.len());
    // Receivers that relayed least so far come first, and of equals the one that waited longest.
    let mut turns: BTreeSet<(usize, usize, u32)> = relays.iter().map(|&relay| (0, 0, relay)).collect();
    let tree = |number: usize| {
        let chosen: Vec<(usize, usize, u32)> = (0..inner).filter_map(|_| turns.pop_first()).collect();
        let mut left = below_relays;
        let mut arrangement = Arrangement::new(members, at_root);
        for &(relayed, _, relay) in &chosen {
            let children = left.min(degree);
            left -= children;
            turns.insert((relayed + children, number + 1, relay));
            arrangement.relay(relay, children);
        }
        arrangement.tree()
    };
    Forest::apart((0..members.roots.len()).map(tree).collect())
}

/// A receiver's place, from the outside in.
type Place = (u64, u64, u64);

fn place(site: Site) -> Place {
    (site.aggregation, site.edge, site.host)
}

/// One tree, while receivers are given their parents. Relays are placed first, level by level, each as near as possible to
/// its parent; then the leaves.
#[derive(Debug)]
struct Arrangement<'a> {
    members: &'a Members<'a>,
    at_root: usize,
    /// Children that each receiver will have.
    children: Vec<usize>,
    relays: Vec<u32>,
}

impl<'a> Arrangement<'a> {
    fn new(members: &'a Members<'a>, at_root: usize) -> Arrangement<'a> {
        Arrangement { members, at_root, children: vec![0; members.receivers.len()], relays: Vec::new() }
    }

    fn relay(&mut self, receiver: u32, children: usize) {
        self.children[receiver as usize] = children;
        self.relays.push(receiver);
    }

    fn tree(self) -> Tree {
        let Arrangement { members, at_root, mut children, relays } = self;
        let site = |receiver: u32| place(members.receivers[receiver as usize].site);
        let mut parents = vec![Parent::Root; children.len()];
        let mut waiting = Waiting::new(relays.iter().map(|&relay| (site(relay), relay)));
        // The root's children are as far from each other as possible: each brings the stream to another switch.
        let mut queue: VecDeque<u32> = waiting.spread(at_root).into();
        let mut placed = Vec::with_capacity(relays.len());
        // Relays with places for children whose edge has no more relays, and those whose aggregation has none either.
        let (mut near, mut far) = (VecDeque::new(), VecDeque::new());
        let mut adopt = |parent: u32, child: u32| {
            children[parent as usize] -= 1;
            parents[child as usize] = Parent::Receiver(parent as usize);
            children[parent as usize] > 0
        };
        loop {
            while let Some(relay) = queue.pop_front() {
                placed.push(relay);
                let mut has_place = true;
                while has_place && let Some(child) = waiting.within(site(relay), Reach::Edge) {
                    has_place = adopt(relay, child);
                    queue.push_back(child);
                }
                near.extend(has_place.then_some(relay));
            }
            // Nothing is within an edge now: one connection to another edge, and on from there.
            if let Some(&relay) = near.front() {
                let child = waiting.within(site(relay), Reach::Aggregation);
                let keeps_place = child.is_some_and(|child| adopt(relay, child));
                queue.extend(child);
                if !keeps_place {
                    near.pop_front();
                    far.extend(child.is_none().then_some(relay));
                }
            } else if let Some(&relay) = far.front()
                && let Some(child) = waiting.within(site(relay), Reach::Everywhere)
            {
                if !adopt(relay, child) {
                    far.pop_front();
                }
                queue.push_back(child);
            } else {
                break;
            }
        }
        let is_relay: BTreeSet<u32> = relays.into_iter().collect();
        let leaves = (0u32..children.len() as u32).filter(|receiver| !is_relay.contains(receiver));
        let mut waiting = Waiting::new(leaves.map(|leaf| (site(leaf), leaf)));
        // Those near by first: what is left has a long way to any parent.
        for reach in [Reach::Edge, Reach::Aggregation, Reach::Everywhere] {
            for &relay in &placed {
                while children[relay as usize] > 0
                    && let Some(child) = waiting.within(site(relay), reach)
                {
                    children[relay as usize] -= 1;
                    parents[child as usize] = Parent::Receiver(relay as usize);
                }
            }
        }
        // The others are the root's.
        Tree::new(parents).expect("relays are below relays that were placed before")
    }
}

/// How far a child may be from its parent.
#[derive(Debug, Clone, Copy)]
enum Reach {
    Edge,
    Aggregation,
    Everywhere,
}

/// Receivers without a parent, by their places.
#[derive(Debug)]
struct Waiting(BTreeMap<Place, VecDeque<u32>>);

impl Waiting {
    fn new(receivers: impl Iterator<Item = (Place, u32)>) -> Waiting {
        let mut waiting: BTreeMap<Place, VecDeque<u32>> = BTreeMap::new();
        receivers.for_each(|(place, receiver)| waiting.entry(place).or_default().push_back(receiver));
        Waiting(waiting)
    }

    fn take(&mut self, place: Place) -> Option<u32> {
        let here = self.0.get_mut(&place)?;
        let receiver = here.pop_front();
        if here.is_empty() {
            self.0.remove(&place);
        }
        receiver
    }

    fn within(&mut self, near: Place, reach: Reach) -> Option<u32> {
        const ALL: u64 = u64::MAX;
        let (aggregation, edge, _) = near;
        let found = match reach {
            Reach::Edge => self.0.range((aggregation, edge, 0)..=(aggregation, edge, ALL)).next(),
            Reach::Aggregation => self.0.range((aggregation, 0, 0)..=(aggregation, ALL, ALL)).next(),
            Reach::Everywhere => self.0.iter().next(),
        };
        // A process on the same host is nearest of all.
        let place = if self.0.contains_key(&near) { near } else { *found?.0 };
        self.take(place)
    }

    /// Some receivers from as many edges as possible.
    fn spread(&mut self, count: usize) -> Vec<u32> {
        let mut taken = Vec::new();
        let mut last: Option<Place> = None;
        while taken.len() < count {
            let after = last.map_or(Bound::Unbounded, |(aggregation, edge, _)| {
                Bound::Excluded((aggregation, edge, u64::MAX))
            });
            let next = self.0.range((after, Bound::Unbounded)).next().or(self.0.iter().next());
            let Some((&place, _)) = next else { break };
            taken.extend(self.take(place));
            last = Some(place);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broadcast::{Receiver, Topology};
    use proptest::prelude::*;

    fn sites(count: usize, edges: usize) -> Vec<Site> {
        let site = |number: usize| {
            let edge = (number % edges) as u64;
            Site { host: number as u64, edge, aggregation: edge / 4 }
        };
        (0..count).map(site).collect()
    }

    fn plant(roots: &[Site], can_relay: &[bool], edges: usize, degree: usize) -> Forest {
        let topology = Topology::default();
        let receivers: Vec<Receiver> = sites(can_relay.len(), edges)
            .into_iter()
            .zip(can_relay)
            .map(|(site, &can_relay)| Receiver { site, can_relay })
            .collect();
        let members = Members { roots, receivers: &receivers, topology: &topology };
        let forest = rotated(&members, degree);
        forest.check(&members).unwrap();
        forest
    }

    #[test]
    fn other_receivers_relay_in_the_next_tree() {
        let forest = plant(&sites(2, 1), &[true; 8], 1, 2);
        let inner = |root: usize| -> Vec<usize> {
            (0..8).filter(|&receiver| forest.children(root, Parent::Receiver(receiver)).len() > 0).collect()
        };
        assert_eq!([inner(0), inner(1)], [vec![0, 1, 2], vec![3, 4, 5]]);
        assert_eq!((forest.children(0, Parent::Root).len(), forest.depth()), (2, 3));
    }

    /// 40 workers and 10 servers: a server sends its tenth ten times, and no worker sends more than it receives.
    #[test]
    fn nobody_sends_more_than_it_receives_in_the_papers_cluster() {
        let forest = plant(&sites(10, 5), &[true; 40], 5, 2);
        let relayed: Vec<usize> = (0..40).map(|receiver| forest.relayed(receiver)).collect();
        assert_eq!(relayed.iter().sum::<usize>(), 300);
        assert!(relayed.iter().all(|&relayed| relayed <= 10), "{relayed:?}");
        assert!((0..10).all(|root| forest.children(root, Parent::Root).len() == 10));
    }

    /// A rack is entered once by each tree if its relays have places for the rest of it.
    #[test]
    fn a_stream_stays_below_a_switch_as_long_as_it_can() {
        let forest = plant(&sites(4, 4), &[true; 32], 4, 2);
        for root in 0..4 {
            let crosses = |receiver: usize| match forest.parent(root, receiver) {
                Parent::Root => true,
                Parent::Receiver(parent) => parent % 4 != receiver % 4,
            };
            let crossing = (0..32).filter(|&receiver| crosses(receiver)).count();
            assert!(crossing <= 6, "{crossing} connections into four racks");
        }
    }

    proptest! {
        /// Whatever the numbers, nobody is more than one node's children above anybody else who can relay.
        #[test]
        fn relays_send_alike(
            roots in 1usize..40,
            can_relay in prop::collection::vec(prop::bool::weighted(0.8), 0..80),
            edges in 1usize..10,
            degree in 1usize..6,
        ) {
            let forest = plant(&sites(roots, edges), &can_relay, edges, degree);
            let relays = || (0..can_relay.len()).filter(|&receiver| can_relay[receiver]);
            let relayed: Vec<usize> = relays().map(|receiver| forest.relayed(receiver)).collect();
            let most = relayed.iter().max().copied().unwrap_or(0);
            prop_assert!(most - relayed.iter().min().copied().unwrap_or(0) <= degree, "{:?}", relayed);
            let total: usize = relayed.iter().sum();
            prop_assert!(most * relayed.len() <= total + degree * relayed.len());
            for root in 0..roots {
                prop_assert!(forest.tree(root).degree() <= degree);
                let inner = forest.tree(root).receivers() - forest.tree(root).leaves().count();
                // As many relays as the tree needs, and no more.
                let needed = can_relay.len().saturating_sub(degree.max(roots)).div_ceil(degree);
                prop_assert_eq!(inner, needed.min(relayed.len()));
            }
        }
    }
}
