//! P3 by local search: receivers change levels while that makes the tree cheaper.
//!
//! A tree is given by the number of receivers of each group on each level. The connections between two levels follow from
//! these numbers, the shortest first. So a step of the search moves one receiver to another level, or two at once, and all
//! connections are drawn anew.

use super::p3::{Flow, P3, Plan, SPANS, room};
use crate::prng::Prng;

/// Groups, on levels, that all attempts together may look at. It is what the time depends on: the core has no clock.
const WORK: usize = 10_000_000;
/// Shapes that the search begins with, at most.
const SHAPES: usize = 8;
/// With more groups times levels than this there is no time for more than two shapes, or several ways to connect levels.
const LARGE: usize = 200;

/// Receivers that a kick moves at most.
const KICKED: u64 = 5;
/// Attempts at a kick that leaves a tree.
const ATTEMPTS: usize = 30;

/// The best plan that was found.
///
/// A descent from some shapes, and then from the best tree after a kick: a few receivers moved at random, by a seed that is
/// always the same. It ends after `kicks` in a row that lead to no better tree.
pub(super) fn search(p3: &P3, kicks: usize) -> Plan {
    let mut wiring = Wiring::new(p3);
    let most = p3.degree.min(p3.receivers()).max(p3.root_children);
    let is_large = p3.groups.len() * p3.depth > LARGE;
    let shapes =
        (p3.root_children..=most).flat_map(|children| [(children, Shape::Flat), (children, Shape::Deep)]);
    let starts: Vec<Counts> = shapes
        .take(if is_large { 2 } else { SHAPES })
        .filter_map(|(children, shape)| begin(p3, children, shape))
        .collect();
    let mut work = WORK;
    let mut best: Option<(i64, Counts)> = None;
    for (number, counts) in starts.iter().enumerate() {
        // Half of the work is for the starts, in equal parts.
        let share = (work - WORK / 2) / (starts.len() - number);
        let mut attempt = Attempt::new(&mut wiring, counts.clone(), share);
        let cost = attempt.descend();
        work -= share - attempt.work;
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, attempt.counts));
        }
    }
    let (mut least, mut counts) = best.expect("a problem has room for its receivers");
    let (mut prng, mut failed, bound) = (Prng::new(0), 0, p3.bound());
    while failed < kicks && work > 0 && least > bound {
        let mut attempt = Attempt::new(&mut wiring, counts.clone(), work);
        failed += 1;
        if attempt.kick(&mut prng) {
            let cost = attempt.descend();
            if cost < least {
                (least, counts, failed) = (cost, attempt.counts, 0);
            }
        }
        work = attempt.work;
    }
    let flow = |level: usize| wiring.flow(&counts[level], &counts[level + 1]).expect("it was wired before");
    let flows = (0..p3.depth.saturating_sub(1)).map(flow).collect();
    Plan { counts, flows }
}

/// Receivers of each group on each level: `[level][group]`.
type Counts = Vec<Vec<usize>>;

/// How levels are filled at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// As many receivers as possible near to the root.
    Flat,
    /// As few as possible: many relays, few leaves.
    Deep,
}

/// A plan to begin with: levels filled by relays first, every level with its share of each group.
fn begin(p3: &P3, children: usize, shape: Shape) -> Option<Counts> {
    let mut left: Vec<usize> = p3.groups.iter().map(|group| group.members.len()).collect();
    let is_relay = |group: usize| p3.groups[group].can_relay;
    let sum = |left: &[usize], relays: bool| -> usize {
        (0..left.len()).filter(|&group| is_relay(group) == relays).map(|group| left[group]).sum()
    };
    let mut places = children;
    let mut counts = Vec::new();
    for level in 0..p3.depth {
        let (relays, leaves) = (sum(&left, true), sum(&left, false));
        let levels = p3.depth - level;
        let fits = |places: usize| room(places, p3.degree, levels, relays) >= relays + leaves;
        if !fits(places) {
            return None;
        }
        let wanted = match shape {
            Shape::Deep if level > 0 => (0..=places).find(|&places| fits(places)).unwrap_or(places),
            _ => places,
        };
        let of_relays = wanted.min(relays);
        let of_leaves = (wanted - of_relays).min(leaves);
        let mut here = vec![0; left.len()];
        for (count, relays) in [(of_relays, true), (of_leaves, false)] {
            share_out(count, &left, |group| is_relay(group) == relays, &mut here);
        }
        left.iter_mut().zip(&here).for_each(|(left, here)| *left -= here);
        places = of_relays * p3.degree;
        counts.push(here);
    }
    left.iter().all(|&left| left == 0).then_some(counts)
}

/// Gives each of these groups its share of `count`, by the receivers that it has left.
fn share_out(count: usize, left: &[usize], takes_part: impl Fn(usize) -> bool, here: &mut [usize]) {
    let total: usize = (0..left.len()).filter(|&group| takes_part(group)).map(|group| left[group]).sum();
    let (mut before, mut given) = (0, 0);
    for group in (0..left.len()).filter(|&group| takes_part(group)) {
        before += left[group];
        // Rounded at the borders of groups, so that the shares add up.
        let until = count * before / total.max(1);
        here[group] += until - given;
        given = until;
    }
}

/// One descent from one beginning.
struct Attempt<'a, 'p> {
    wiring: &'a mut Wiring<'p>,
    counts: Counts,
    /// Receivers on each level, and those of them that can relay.
    levels: Vec<(usize, usize)>,
    /// Costs of the connections between two levels: of the tree that was last accepted, and of the one that is tried.
    accepted: Vec<i64>,
    tried: Vec<i64>,
    /// Moves to or from each level since a tree was accepted.
    touched: Vec<usize>,
    /// Groups that may still be looked at.
    work: usize,
    /// The move at which the last pair that helped was found: the others are tried first.
    turn: usize,
}

/// A receiver of a group changes levels.
#[derive(Debug, Clone, Copy)]
struct Move {
    group: usize,
    from: usize,
    to: usize,
}

impl<'a, 'p> Attempt<'a, 'p> {
    fn new(wiring: &'a mut Wiring<'p>, counts: Counts, work: usize) -> Attempt<'a, 'p> {
        let groups = &wiring.p3.groups;
        let relays = |of_level: &Vec<usize>| -> usize {
            groups.iter().zip(of_level).filter(|(group, _)| group.can_relay).map(|(_, count)| count).sum()
        };
        let levels = counts.iter().map(|of_level| (of_level.iter().sum(), relays(of_level))).collect();
        let (pairs, touched) = (vec![0; counts.len() - 1], vec![1; counts.len()]);
        Attempt { wiring, counts, levels, accepted: pairs.clone(), tried: pairs, touched, work, turn: 0 }
    }

    /// Moves receivers while that makes the tree cheaper; returns its cost.
    fn descend(&mut self) -> i64 {
        let mut best = self.cost().expect("an attempt begins with a tree");
        self.accept();
        let moves = self.moves();
        while self.single(&moves, &mut best)
            || self.exchange(&moves, &mut best)
            || self.pair(&moves, &mut best)
        {}
        best
    }

    /// Moves some receivers; false if no attempt leaves a tree.
    fn kick(&mut self, prng: &mut Prng) -> bool {
        let moves = self.moves();
        let any = |prng: &mut Prng| moves.get(prng.below(moves.len() as u64) as usize).copied();
        for _ in 0..ATTEMPTS {
            let mut made = Vec::new();
            for _ in 0..2 + prng.below(KICKED - 1) {
                made.extend(any(prng).filter(|&step| self.make(step)));
            }
            if self.has_places() {
                return true;
            }
            made.into_iter().rev().for_each(|step| self.undo(step));
        }
        false
    }

    fn moves(&self) -> Vec<Move> {
        let levels = self.counts.len();
        let groups = 0..self.counts.first().map_or(0, Vec::len);
        let of = |group| {
            let from = move |from| (0..levels).map(move |to| Move { group, from, to });
            (0..levels).flat_map(from).filter(|step| step.from != step.to)
        };
        groups.flat_map(of).collect()
    }

    /// One receiver at a time, until none of these moves helps.
    fn single(&mut self, moves: &[Move], best: &mut i64) -> bool {
        let mut helped = false;
        for _ in 0..moves.len() {
            self.turn = (self.turn + 1) % moves.len();
            let step = moves[self.turn];
            while self.work > 0 && self.make(step) {
                match self.cost() {
                    Some(cost) if cost < *best => {
                        (*best, helped) = (cost, true);
                        self.accept();
                    }
                    _ => {
                        self.undo(step);
                        break;
                    }
                }
            }
        }
        helped && self.work > 0
    }

    /// Two receivers change levels with each other, until one such pair helps: levels stay as full as they are.
    fn exchange(&mut self, moves: &[Move], best: &mut i64) -> bool {
        let groups = self.wiring.p3.groups.len();
        self.two(moves, best, |_, one| {
            (0..groups).map(move |group| Move { group, from: one.to, to: one.from })
        })
    }

    /// Any two at a time, until one pair helps.
    fn pair(&mut self, moves: &[Move], best: &mut i64) -> bool {
        self.two(moves, best, |turn, _| moves[turn..].iter().copied())
    }

    fn two<I: Iterator<Item = Move>>(
        &mut self,
        moves: &[Move],
        best: &mut i64,
        others: impl Fn(usize, Move) -> I,
    ) -> bool {
        for _ in 0..moves.len() {
            self.turn = (self.turn + 1) % moves.len();
            let one = moves[self.turn];
            if !self.make(one) {
                continue;
            }
            for other in others(self.turn, one) {
                self.work = self.work.saturating_sub(1);
                if self.work == 0 {
                    break;
                }
                if !self.make(other) {
                    continue;
                }
                match self.cost() {
                    Some(cost) if cost < *best => {
                        *best = cost;
                        self.accept();
                        return true;
                    }
                    _ => self.undo(other),
                }
            }
            self.undo(one);
        }
        false
    }

    fn make(&mut self, step: Move) -> bool {
        let has_one = self.counts[step.from][step.group] > 0;
        if has_one {
            self.shift(step.group, step.from, step.to);
            self.touched[step.from] += 1;
            self.touched[step.to] += 1;
        }
        has_one
    }

    fn undo(&mut self, step: Move) {
        self.shift(step.group, step.to, step.from);
        self.touched[step.from] -= 1;
        self.touched[step.to] -= 1;
    }

    /// The tree that was tried is the one to go on from.
    fn accept(&mut self) {
        self.accepted.copy_from_slice(&self.tried);
        self.touched.fill(0);
    }

    fn shift(&mut self, group: usize, from: usize, to: usize) {
        let relays = usize::from(self.wiring.p3.groups[group].can_relay);
        self.counts[from][group] -= 1;
        self.counts[to][group] += 1;
        self.levels[from] = (self.levels[from].0 - 1, self.levels[from].1 - relays);
        self.levels[to] = (self.levels[to].0 + 1, self.levels[to].1 + relays);
    }

    /// Whether no level has more receivers than the one above has places for children.
    fn has_places(&self) -> bool {
        let mut places = self.wiring.p3.degree;
        self.levels.iter().all(|&(here, relays)| {
            let fits = here <= places;
            places = relays * self.wiring.p3.degree;
            fits
        })
    }

    /// The cost of the tree, unless a level has more receivers than places.
    fn cost(&mut self) -> Option<i64> {
        self.work = self.work.saturating_sub(1);
        if !self.has_places() {
            return None;
        }
        let p3 = self.wiring.p3;
        let roots = p3.groups.iter().zip(&self.counts[0]);
        let roots: i64 = roots.map(|(group, &count)| group.root_cost * count as i64).sum();
        let mut cost = roots + p3.alpha * p3.receivers() as i64;
        for level in 1..self.counts.len() {
            // Connections between levels that nobody left or came to are as they were.
            self.tried[level - 1] = match self.touched[level - 1] + self.touched[level] {
                0 => self.accepted[level - 1],
                _ => {
                    self.work = self.work.saturating_sub(p3.groups.len() * self.wiring.orders.len());
                    self.wiring.cost(&self.counts[level - 1], &self.counts[level])?
                }
            };
            cost += self.tried[level - 1];
        }
        Some(cost)
    }
}

/// Draws connections between two levels.
struct Wiring<'p> {
    p3: &'p P3,
    /// Spans in the order in which they are used; whether for the first child of a receiver, which then is no leaf. None of
    /// these orders is the best for all levels.
    orders: Vec<Vec<(usize, bool)>>,
    /// Places for first children, and for others, of each group on the upper level.
    first: Vec<usize>,
    others: Vec<usize>,
    /// Receivers of each group on the lower level that have no parent yet.
    below: Vec<usize>,
    /// Upper and lower ends within each cluster.
    ends: Vec<(usize, usize)>,
}

impl<'p> Wiring<'p> {
    fn new(p3: &'p P3) -> Wiring<'p> {
        let by_span: Vec<(usize, bool)> = (0..SPANS).flat_map(|span| [(span, true), (span, false)]).collect();
        let (mut by_cost, mut first_children) = (by_span.clone(), by_span.clone());
        by_cost.sort_by_key(|&(span, is_first)| p3.costs[span] - if is_first { p3.alpha } else { 0 });
        first_children.sort_by_key(|&(_, is_first)| !is_first);
        let mut orders = vec![by_cost, by_span, first_children];
        let groups = p3.groups.len();
        if p3.alpha == 0 || groups * p3.depth > LARGE {
            orders.truncate(1);
        }
        orders.dedup();
        Wiring {
            p3,
            orders,
            first: vec![0; groups],
            others: vec![0; groups],
            below: vec![0; groups],
            ends: vec![(0, 0); groups],
        }
    }

    /// Cost of the connections between two levels, less that of the leaves that are none by them.
    fn cost(&mut self, above: &[usize], below: &[usize]) -> Option<i64> {
        (0..self.orders.len()).filter_map(|order| self.cost_by(order, above, below)).min()
    }

    fn cost_by(&mut self, order: usize, above: &[usize], below: &[usize]) -> Option<i64> {
        let p3 = self.p3;
        let mut cost = 0;
        self.wire(order, above, below, |span, is_first, group, (_, to)| {
            debug_assert!(p3.groups[group].clusters[span].is_some());
            cost += (p3.costs[span] - if is_first { p3.alpha } else { 0 }) * to as i64;
        })
        .then_some(cost)
    }

    /// The connections themselves.
    fn flow(&mut self, above: &[usize], below: &[usize]) -> Option<Flow> {
        let orders = 0..self.orders.len();
        let order = orders.min_by_key(|&order| self.cost_by(order, above, below).unwrap_or(i64::MAX))?;
        let groups = self.p3.groups.len();
        let none = || std::array::from_fn(|_| vec![0; groups]);
        let mut flow = Flow { from: none(), to: none() };
        self.wire(order, above, below, |span, _, group, (from, to)| {
            flow.from[span][group] += from;
            flow.to[span][group] += to;
        })
        .then_some(flow)
    }

    /// Connects every receiver below, and tells of each group's ends. False if there are not enough places above.
    fn wire(
        &mut self,
        order: usize,
        above: &[usize],
        below: &[usize],
        mut told: impl FnMut(usize, bool, usize, (usize, usize)),
    ) -> bool {
        let p3 = self.p3;
        for (index, group) in p3.groups.iter().enumerate() {
            let relays = if group.can_relay { above[index] } else { 0 };
            (self.first[index], self.others[index]) = (relays, relays * (p3.degree - 1));
        }
        self.below.copy_from_slice(below);
        let mut left: usize = below.iter().sum();
        for &(span, is_first) in &self.orders[order] {
            if left == 0 {
                break;
            }
            let places = if is_first { &mut self.first } else { &mut self.others };
            self.ends.fill((0, 0));
            for (index, group) in p3.groups.iter().enumerate() {
                if let Some(cluster) = group.clusters[span] {
                    self.ends[cluster].0 += places[index];
                    self.ends[cluster].1 += self.below[index];
                }
            }
            self.ends.iter_mut().for_each(|(up, down)| (*up, *down) = ((*up).min(*down), (*up).min(*down)));
            for (index, group) in p3.groups.iter().enumerate() {
                let Some(cluster) = group.clusters[span] else { continue };
                let (up, down) = &mut self.ends[cluster];
                let (from, to) = (places[index].min(*up), self.below[index].min(*down));
                if from + to == 0 {
                    continue;
                }
                *up -= from;
                *down -= to;
                places[index] -= from;
                self.below[index] -= to;
                left -= to;
                told(span, is_first, index, (from, to));
            }
        }
        left == 0
    }
}
