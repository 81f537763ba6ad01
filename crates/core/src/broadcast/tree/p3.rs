//! P3 as a problem about numbers: receivers that are at the same place are alike, so that only their number on each level of
//! the tree counts.

use super::super::{Costs, ForestError, Members, Parent, Quality, Site, Tree};
use super::{milp, search};
use std::collections::BTreeMap;

/// Costs are whole multiples of this, so that sums of them are exact.
const UNIT: f64 = 1e-6;
/// How long the search goes on where it finds nothing better, and where the solver begins with what it found.
const KICKS: usize = 300;
const FEW_KICKS: usize = 10;
/// Host, edge switch, aggregation switch, everywhere.
pub(super) const SPANS: usize = 4;

/// An instance of P3: the tree of least cost over all receivers, with bounds on degree and depth.
#[derive(Debug)]
pub struct P3 {
    /// Children of a node at most.
    pub(super) degree: usize,
    /// Hops at most. Never more than there are receivers.
    pub(super) depth: usize,
    /// Cost of a leaf, like all costs in [`UNIT`].
    pub(super) alpha: i64,
    /// Cost of a connection whose ends have this span in common, and no smaller one.
    pub(super) costs: [i64; SPANS],
    pub(super) groups: Vec<Group>,
    /// Children of the root at least.
    pub(super) root_children: usize,
    sites: Vec<Site>,
    root_costs: Vec<i64>,
}

/// Receivers that can change places without any effect on costs.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) members: Vec<u32>,
    pub(super) can_relay: bool,
    /// Cost of a connection to the root: the sum over all servers, since they share the tree.
    pub(super) root_cost: i64,
    /// Clusters of groups that it is in, one for each span; none of spans that no two of its receivers have in common.
    pub(super) clusters: [Option<usize>; SPANS],
}

/// A tree and how good it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Solved {
    /// The tree.
    pub tree: Tree,
    /// Its cost, and what no tree can be below.
    pub quality: Quality,
}

/// A tree in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// Receivers of each group on each level: `counts[level][group]`.
    pub(super) counts: Vec<Vec<usize>>,
    /// Connections from each level to the next.
    pub(super) flows: Vec<Flow>,
}

/// Connections between two levels, by the span that their ends have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flow {
    /// `from[span][group]` upper ends.
    pub(super) from: [Vec<usize>; SPANS],
    /// `to[span][group]` lower ends.
    pub(super) to: [Vec<usize>; SPANS],
}

impl P3 {
    /// The instance of these members; an error if a tree within these bounds does not hold them.
    pub fn new(members: &Members<'_>, degree: usize, depth: usize, alpha: f64) -> Result<P3, ForestError> {
        let receivers = members.receivers.len();
        let relays = members.receivers.iter().filter(|receiver| receiver.can_relay).count();
        let depth_within = depth.min(receivers.max(1));
        let room = room(degree, degree, depth_within, relays);
        if room < receivers {
            return Err(ForestError::NoRoom { degree, depth, room, receivers, relays });
        }
        let costs = members.topology.costs();
        let sites: Vec<Site> =
            members.receivers.iter().map(|receiver| coarse(receiver.site, costs)).collect();
        let root_cost =
            |site: Site| -> i64 { members.roots.iter().map(|&root| whole(costs.between(root, site))).sum() };
        // Sites repeat, and so do roots.
        let mut known = BTreeMap::new();
        let root_costs: Vec<i64> = (members.receivers.iter())
            .map(|receiver| *known.entry(receiver.site).or_insert_with(|| root_cost(receiver.site)))
            .collect();
        let needed = |children: &usize| self::room(*children, degree, depth_within, relays) >= receivers;
        Ok(P3 {
            degree,
            depth: depth_within,
            alpha: whole(alpha),
            costs: [costs.same_host, costs.same_edge, costs.same_aggregation, costs.across].map(whole),
            groups: groups(members, &sites, &root_costs),
            root_children: (0..=degree).find(needed).unwrap_or(degree),
            sites,
            root_costs,
        })
    }

    /// The best tree: exactly, if the instance is small, and else by [`P3::search`].
    pub fn solve(&self) -> Solved {
        let found = search::search(self, if milp::is_small(self) { FEW_KICKS } else { KICKS });
        let relaxed = milp::relax(self, &found);
        let best = match relaxed.plan {
            Some(plan) if self.worth(&plan) < self.worth(&found) => plan,
            _ => found,
        };
        self.solved(&best, relaxed.bound)
    }

    /// A good tree by local search alone.
    pub fn search(&self) -> Solved {
        self.solved(&search::search(self, KICKS), self.bound())
    }

    /// What a tree of these receivers costs, by eq. 12.
    pub fn cost(&self, tree: &Tree) -> f64 {
        self.whole_cost(tree) as f64 * UNIT
    }

    fn solved(&self, plan: &Plan, bound: i64) -> Solved {
        let tree = self.tree(plan);
        let cost = self.whole_cost(&tree);
        // A cost is a multiple of the step, so that the bound is one too.
        let step = self.step();
        let bound = (bound.max(self.bound()) + step - 1) / step * step;
        debug_assert!(bound <= cost, "{bound} is no bound: {cost}");
        let quality = Quality { cost: cost as f64 * UNIT, bound: bound.min(cost) as f64 * UNIT };
        Solved { tree, quality }
    }

    fn whole_cost(&self, tree: &Tree) -> i64 {
        let cost = |receiver: usize| match tree.parent(receiver) {
            Parent::Root => self.root_costs[receiver],
            Parent::Receiver(parent) => self.costs[span(self.sites[parent], self.sites[receiver])],
        };
        let connections: i64 = (0..tree.receivers()).map(cost).sum();
        connections + self.alpha * tree.leaves().count() as i64
    }

    /// What a plan costs.
    pub(super) fn worth(&self, plan: &Plan) -> i64 {
        self.whole_cost(&self.tree(plan))
    }

    pub(super) fn receivers(&self) -> usize {
        self.sites.len()
    }

    /// The largest number that divides all costs.
    pub(super) fn step(&self) -> i64 {
        let roots = self.groups.iter().map(|group| group.root_cost);
        let all = self.costs.into_iter().chain([self.alpha]).chain(roots);
        all.fold(0, greatest_common_divisor).max(1)
    }

    /// A cost that no tree is below, without looking for one.
    ///
    /// The cheapest root connections; beside them, every cluster of receivers that no root connection leads to is entered
    /// from outside, and the other connections are as short as they can be. Leaves are at the ends of paths that are not
    /// longer than the depth.
    pub(super) fn bound(&self) -> i64 {
        let receivers = self.receivers();
        let mut roots: Vec<i64> = Vec::with_capacity(receivers);
        self.groups.iter().for_each(|group| roots.extend(vec![group.root_cost; group.members.len()]));
        roots.sort_unstable();
        // The receivers of a cluster are below as many connections into it as trees from level 1 are needed to hold them.
        let entries: Vec<usize> = (0..SPANS).map(|span| self.entries(span)).collect();
        let connections = |children: usize| -> i64 {
            let mut left = receivers - children;
            let mut cost: i64 = roots[..children].iter().sum();
            // From the outside in: those into aggregation switches, edge switches, hosts.
            for span in (1..SPANS).rev() {
                let into =
                    entries[span - 1].saturating_sub(children + (receivers - children - left)).min(left);
                cost += self.costs[span] * into as i64;
                left -= into;
            }
            cost + self.costs[0] * left as i64
        };
        let children = self.root_children..=self.degree.min(receivers);
        children.map(connections).min().unwrap_or(0) + self.alpha * self.fewest_leaves() as i64
    }

    /// Receivers below one child of the root at most, with itself.
    pub(super) fn below_one(&self) -> usize {
        room(1, self.degree, self.depth, self.receivers()).max(1)
    }

    /// Every path from the root ends in a leaf, and is no longer than the depth.
    pub(super) fn fewest_leaves(&self) -> usize {
        let cannot = self.groups.iter().filter(|group| !group.can_relay).map(|group| group.members.len());
        self.receivers().div_ceil(self.depth).max(cannot.sum())
    }

    /// Connections into clusters of this span at least, those of the root among them.
    fn entries(&self, span: usize) -> usize {
        let mut clusters: BTreeMap<usize, usize> = BTreeMap::new();
        let mut alone = 0;
        for group in &self.groups {
            match group.clusters[span] {
                Some(cluster) => *clusters.entry(cluster).or_default() += group.members.len(),
                None => alone += group.members.len(),
            }
        }
        alone + clusters.into_values().map(|count| count.div_ceil(self.below_one())).sum::<usize>()
    }

    /// Whether a plan is one of a tree: everybody is on a level, and connections have two ends and are within the degree.
    pub(super) fn holds(&self, plan: &Plan) -> bool {
        let groups = 0..self.groups.len();
        let sum = |ends: &[Vec<usize>; SPANS], group: usize| ends.iter().map(|of| of[group]).sum::<usize>();
        let everybody = |group: usize| {
            plan.counts.iter().map(|counts| counts[group]).sum::<usize>() == self.groups[group].members.len()
        };
        let matched = |flow: &Flow| {
            (0..SPANS).all(|span| {
                let mut ends: BTreeMap<Option<usize>, (usize, usize)> = BTreeMap::new();
                for group in groups.clone() {
                    let (up, down) = ends.entry(self.groups[group].clusters[span]).or_default();
                    *up += flow.from[span][group];
                    *down += flow.to[span][group];
                }
                ends.into_iter().all(|(cluster, (up, down))| up == down && (cluster.is_some() || up == 0))
            })
        };
        let within = |(level, flow): (usize, &Flow)| {
            groups.clone().all(|group| {
                let relays = if self.groups[group].can_relay { plan.counts[level][group] } else { 0 };
                sum(&flow.from, group) <= relays * self.degree
                    && sum(&flow.to, group) == plan.counts[level + 1][group]
            })
        };
        groups.clone().all(everybody)
            && plan.counts[0].iter().sum::<usize>() <= self.degree
            && plan.flows.iter().all(matched)
            && plan.flows.iter().enumerate().all(within)
    }

    /// Makes a tree of a plan.
    pub(super) fn tree(&self, plan: &Plan) -> Tree {
        let mut parents = vec![Parent::Root; self.receivers()];
        let mut used = vec![0; self.groups.len()];
        let mut above: Vec<&[u32]> = Vec::new();
        for (level, counts) in plan.counts.iter().enumerate() {
            let mut here: Vec<&[u32]> = Vec::new();
            for (group, &count) in counts.iter().enumerate() {
                here.push(&self.groups[group].members[used[group]..used[group] + count]);
                used[group] += count;
            }
            if level > 0 {
                self.connect(&plan.flows[level - 1], &above, &here, &mut parents);
            }
            above = here;
        }
        Tree::new(parents).expect("every level is below the one before")
    }

    /// Gives the receivers of a level parents on the level above. Those of a group above take turns, so that as many as
    /// possible are no leaves, and all within the degree.
    fn connect(&self, flow: &Flow, above: &[&[u32]], here: &[&[u32]], parents: &mut [Parent]) {
        let mut turns = vec![0; above.len()];
        let mut given = vec![0; here.len()];
        for span in 0..SPANS {
            // Upper ends of each cluster that have no lower end yet.
            let mut open: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
            for (group, &count) in flow.from[span].iter().enumerate().filter(|(_, count)| **count > 0) {
                let cluster = self.groups[group].clusters[span].expect("connections are within a cluster");
                open.entry(cluster).or_default().push((group, count));
            }
            for (group, &count) in flow.to[span].iter().enumerate().filter(|(_, count)| **count > 0) {
                let cluster = self.groups[group].clusters[span].expect("connections are within a cluster");
                for _ in 0..count {
                    let ends = open.get_mut(&cluster).expect("a lower end has an upper end");
                    let (from, left) = ends.last_mut().expect("there are as many upper ends as lower ends");
                    let parent = above[*from][turns[*from] % above[*from].len()];
                    turns[*from] += 1;
                    *left -= 1;
                    if *left == 0 {
                        ends.pop();
                    }
                    parents[here[group][given[group]] as usize] = Parent::Receiver(parent as usize);
                    given[group] += 1;
                }
            }
        }
    }
}

/// Receivers that a tree can have whose root has `children` children, other nodes `degree`, of which `relays` can have some.
pub(super) fn room(children: usize, degree: usize, depth: usize, mut relays: usize) -> usize {
    let (mut room, mut places) = (0usize, children);
    for _ in 0..depth {
        room = room.saturating_add(places);
        let above = places.min(relays);
        relays -= above;
        places = above.saturating_mul(degree);
        if places == 0 {
            break;
        }
    }
    room
}

/// A cost in whole units.
fn whole(cost: f64) -> i64 {
    (cost / UNIT).round() as i64
}

fn greatest_common_divisor(one: i64, other: i64) -> i64 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

/// A site without the differences that cost nothing.
fn coarse(mut site: Site, costs: &Costs) -> Site {
    if whole(costs.same_aggregation) == whole(costs.across) {
        site.aggregation = 0;
    }
    if whole(costs.same_edge) == whole(costs.same_aggregation) {
        site.edge = site.aggregation;
    }
    if whole(costs.same_host) == whole(costs.same_edge) {
        site.host = site.edge;
    }
    site
}

/// The smallest span that two sites have in common.
fn span(one: Site, other: Site) -> usize {
    if one.aggregation != other.aggregation {
        3
    } else if one.edge != other.edge {
        2
    } else if one.host != other.host {
        1
    } else {
        0
    }
}

/// The receivers in groups of equals.
fn groups(members: &Members<'_>, sites: &[Site], root_costs: &[i64]) -> Vec<Group> {
    /// Numbers of a site's spans. Hosts of different edges may have the same number.
    fn places(site: Site) -> [(u64, u64, u64); SPANS] {
        let Site { host, edge, aggregation } = site;
        [(aggregation, edge, host), (aggregation, edge, 0), (aggregation, 0, 0), (0, 0, 0)]
    }
    let mut counts: [BTreeMap<(u64, u64, u64), usize>; SPANS] = Default::default();
    for &site in sites {
        places(site)
            .into_iter()
            .enumerate()
            .for_each(|(span, place)| *counts[span].entry(place).or_default() += 1);
    }
    // A receiver without others at its host is like all such receivers below its edge switch, and so on.
    let mut found: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    for (number, (receiver, &site)) in (0u32..).zip(members.receivers.iter().zip(sites)) {
        let places = places(site);
        let smallest = (0..SPANS - 1).find(|&span| counts[span][&places[span]] > 1).unwrap_or(SPANS - 1);
        let key = (places[2], places[1], smallest, places[smallest], !receiver.can_relay);
        // Singles of several edges, or aggregations, are one group.
        let key = match smallest {
            2 => (places[2], places[2], key.2, key.3, key.4),
            3 => (places[3], places[3], key.2, key.3, key.4),
            _ => key,
        };
        found.entry((key, root_costs[number as usize])).or_default().push(number);
    }
    let mut clusters: [BTreeMap<(u64, u64, u64), usize>; SPANS] = Default::default();
    let mut groups = Vec::new();
    for (((_, _, smallest, ..), root_cost), numbers) in found {
        let first = numbers[0] as usize;
        let places = places(sites[first]);
        let clusters = std::array::from_fn(|span| {
            let next = clusters[span].len();
            (span >= smallest).then(|| *clusters[span].entry(places[span]).or_insert(next))
        });
        groups.push(Group {
            can_relay: members.receivers[first].can_relay,
            root_cost,
            clusters,
            members: numbers,
        });
    }
    groups
}
