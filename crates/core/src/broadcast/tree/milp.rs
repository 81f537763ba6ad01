//! P3 as a mixed integer program, with the same optimum as the paper's and far fewer variables.
//!
//! Eq. 12 to 21 have a variable for every pair of nodes and one for every pair on every path. Here receivers that are alike are
//! counted and not named: `N[g][d]` of group g are on level d, and `I[g][d]` of them have children. Connections between two levels
//! go through the smallest cluster (host, edge switch, aggregation switch, everywhere) that has both ends: `s[g][d][c]` upper
//! ends of a group's receivers in cluster c, `t[g][d][c]` lower ends, as many of both in every cluster. The levels bound the
//! depth. With whole N and I the rest is a network flow, whose best values are whole by themselves.

use super::p3::{Flow, P3, Plan, SPANS};
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions, Variable};
use std::collections::BTreeMap;

/// Up to so many variables the optimum is looked for.
const EXACTLY: usize = 1200;
/// Nodes of the branch and bound tree at most, times the square of variables, as which the time for a node grows. This and not a clock
/// bounds the time: below a second for 20 receivers.
const WORK: u64 = 400_000_000;
/// Up to so many variables the bound is that of the relaxation.
const RELAXED: usize = 3000;

/// What the program tells about an instance.
#[derive(Debug)]
pub(super) struct Relaxation {
    /// The best plan, if one was found.
    pub(super) plan: Option<Plan>,
    /// A cost that no tree is below.
    pub(super) bound: i64,
}

/// Whether the optimum of an instance will be looked for.
pub(super) fn is_small(p3: &P3) -> bool {
    Model::variables(p3) <= EXACTLY
}

/// Solves the instance, if it is small enough; `known` is where the search begins.
pub(super) fn relax(p3: &P3, known: &Plan) -> Relaxation {
    let bound = p3.bound();
    let worth = p3.worth(known);
    let (variables, step) = (Model::variables(p3), p3.step());
    if bound > worth - step || variables > RELAXED {
        return Relaxation { plan: None, bound };
    }
    let exactly = is_small(p3);
    let model = Model::new(p3, exactly, step);
    let mut options = SolveOptions::default();
    if exactly {
        options.node_limit = Some(WORK / (variables as u64).pow(2).max(1));
        options.warm_start = Some(model.start(p3, known));
        // A tree that costs less costs less by a whole step.
        options.mip_gap = 0.99 * step as f64 / worth.max(1) as f64;
    }
    let Ok(outcome) = model.problem.solve_with(options) else {
        // A numerical failure: the search has the answer, without a better bound.
        return Relaxation { plan: None, bound };
    };
    let proven =
        if exactly { outcome.stats().best_bound } else { outcome.solution().map(|it| it.objective()) };
    // Rounded up to the next whole step, since costs are whole steps; the tolerance is the solver's.
    let proven = proven.map_or(0, |proven| (proven - 1e-4).ceil() as i64 * step);
    let plan = match exactly {
        true => outcome.solution().and_then(|solution| model.plan(p3, |it| solution.var_value(it))),
        false => None,
    };
    Relaxation { plan, bound: bound.max(proven) }
}

/// The program of an instance.
struct Model {
    problem: Problem,
    /// `[level][group]`.
    counts: Vec<Vec<Variable>>,
    /// `[level][group]`, of relays that are not on the last level.
    inner: Vec<Vec<Option<Variable>>>,
    /// `[level][span][group]`, of the level above.
    from: Vec<Vec<Vec<Option<Variable>>>>,
    /// The same of the level below.
    to: Vec<Vec<Vec<Option<Variable>>>>,
}

impl Model {
    /// Number of variables of an instance, or a little more.
    fn variables(p3: &P3) -> usize {
        let spans: usize = p3.groups.iter().map(|it| it.clusters.iter().flatten().count()).sum();
        p3.depth.saturating_mul(2 * p3.groups.len() + 2 * spans)
    }

    fn new(p3: &P3, in_whole_numbers: bool, step: i64) -> Model {
        let cost = |cost: i64| (cost / step) as f64;
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let levels = p3.depth;
        let useful = useful_spans(p3);
        let whole = |problem: &mut Problem, price: f64, most: usize| match in_whole_numbers {
            true => problem.add_integer_var(price, (0, i32::try_from(most).unwrap_or(i32::MAX))),
            false => problem.add_var(price, (0.0, most as f64)),
        };
        // Every receiver is a leaf until it is an inner node.
        let leaf = cost(p3.alpha);
        let (mut counts, mut inner, mut from, mut to) = (vec![], vec![], vec![], vec![]);
        for level in 0..levels {
            let (mut counts_here, mut inner_here) = (vec![], vec![]);
            for group in &p3.groups {
                let price = if level == 0 { cost(group.root_cost) } else { 0.0 };
                counts_here.push(whole(&mut problem, price + leaf, group.members.len()));
                let has_inner = group.can_relay && level + 1 < levels;
                inner_here.push(has_inner.then(|| whole(&mut problem, -leaf, group.members.len())));
            }
            counts.push(counts_here);
            inner.push(inner_here);
        }
        for _ in 1..levels {
            let mut ends = |is_upper: bool| -> Vec<Vec<Option<Variable>>> {
                let variable = |span: usize, group: usize| {
                    let has_end = useful[span][group] && (!is_upper || p3.groups[group].can_relay);
                    let price = if is_upper { 0.0 } else { cost(p3.costs[span]) };
                    has_end.then(|| problem.add_var(price, (0.0, f64::INFINITY)))
                };
                let mut variable = variable;
                (0..SPANS)
                    .map(|span| (0..p3.groups.len()).map(|group| variable(span, group)).collect())
                    .collect()
            };
            from.push(ends(true));
            to.push(ends(false));
        }
        let mut model = Model { problem, counts, inner, from, to };
        model.constrain(p3);
        model
    }

    fn constrain(&mut self, p3: &P3) {
        use ComparisonOp::{Eq, Ge, Le};
        let degree = p3.degree.min(p3.receivers()) as f64;
        for (index, group) in p3.groups.iter().enumerate() {
            // Eq. 13: everybody has one parent.
            let all: Vec<_> = self.counts.iter().map(|counts| (counts[index], 1.0)).collect();
            self.problem.add_constraint(all, Eq, group.members.len() as f64);
        }
        // Eq. 14 for the root, and what follows from all others.
        let roots: Vec<_> = self.counts.first().into_iter().flatten().map(|&count| (count, 1.0)).collect();
        self.problem.add_constraint(roots.clone(), Le, degree);
        self.problem.add_constraint(roots, Ge, p3.root_children as f64);
        for (upper, (from, to)) in self.from.iter().zip(&self.to).enumerate() {
            for (index, _) in p3.groups.iter().enumerate() {
                let ends = |ends: &[Vec<Option<Variable>>]| -> Vec<(Variable, f64)> {
                    ends.iter().filter_map(|of_span| of_span[index]).map(|end| (end, 1.0)).collect()
                };
                let mut above = ends(to);
                above.push((self.counts[upper + 1][index], -1.0));
                self.problem.add_constraint(above, Eq, 0.0);
                if let Some(inner) = self.inner[upper][index] {
                    // Eq. 14 and 15: at most so many children, and at least one of those that are no leaves.
                    let children = ends(from);
                    let limited =
                        |factor| children.iter().copied().chain([(inner, factor)]).collect::<Vec<_>>();
                    self.problem.add_constraint(limited(-degree), Le, 0.0);
                    self.problem.add_constraint(limited(-1.0), Ge, 0.0);
                    let here = [(inner, 1.0), (self.counts[upper][index], -1.0)];
                    self.problem.add_constraint(here, Le, 0.0);
                }
            }
            for span in 0..SPANS {
                let mut clusters: BTreeMap<usize, Vec<(Variable, f64)>> = BTreeMap::new();
                for (index, group) in p3.groups.iter().enumerate() {
                    let Some(cluster) = group.clusters[span] else { continue };
                    let ends = clusters.entry(cluster).or_default();
                    ends.extend(from[span][index].map(|end| (end, 1.0)));
                    ends.extend(to[span][index].map(|end| (end, -1.0)));
                }
                for ends in clusters.into_values().filter(|ends| !ends.is_empty()) {
                    self.problem.add_constraint(ends, Eq, 0.0);
                }
            }
        }
        self.cut(p3);
        // Groups that are alike but for their numbers: the first one is nearest to the root.
        for (one, other) in alike(p3) {
            let order = [(self.counts[0][one], 1.0), (self.counts[0][other], -1.0)];
            self.problem.add_constraint(order, Ge, 0.0);
        }
    }

    /// What holds for whole numbers, and brings the relaxation nearer to them.
    fn cut(&mut self, p3: &P3) {
        // Every cluster is entered, from the root or from outside.
        for span in 0..SPANS - 1 {
            let mut clusters: BTreeMap<usize, (usize, Vec<(Variable, f64)>)> = BTreeMap::new();
            for (index, group) in p3.groups.iter().enumerate() {
                let Some(cluster) = group.clusters[span] else { continue };
                let (members, ends) = clusters.entry(cluster).or_default();
                *members += group.members.len();
                ends.push((self.counts[0][index], 1.0));
                let wider = self.to.iter().flat_map(|to| &to[span + 1..]);
                ends.extend(wider.filter_map(|of_span| of_span[index]).map(|end| (end, 1.0)));
            }
            for (members, ends) in clusters.into_values() {
                let entries = members.div_ceil(p3.below_one());
                self.problem.add_constraint(ends, ComparisonOp::Ge, entries as f64);
            }
        }
        let inner: Vec<_> = self.inner.iter().flatten().flatten().map(|&inner| (inner, 1.0)).collect();
        if !inner.is_empty() {
            let most = p3.receivers() - p3.fewest_leaves();
            self.problem.add_constraint(inner, ComparisonOp::Le, most as f64);
        }
    }

    /// The values of a plan that is known, as far as they are whole. Connections follow from these.
    fn start(&self, p3: &P3, plan: &Plan) -> Vec<(Variable, f64)> {
        let mut counts = plan.counts.clone();
        // Groups that are alike change names until they are in order.
        let pairs = alike(p3);
        while let Some(&(one, other)) = pairs.iter().find(|&&(one, other)| counts[0][one] < counts[0][other])
        {
            counts.iter_mut().for_each(|of_level| of_level.swap(one, other));
        }
        let of_level = |(variables, counts): (&Vec<Variable>, &Vec<usize>)| -> Vec<(Variable, f64)> {
            variables.iter().zip(counts).map(|(&variable, &count)| (variable, count as f64)).collect()
        };
        self.counts.iter().zip(&counts).flat_map(of_level).collect()
    }

    /// The plan of a solution; `None` if some number is not whole.
    fn plan(&self, p3: &P3, value: impl Fn(Variable) -> f64) -> Option<Plan> {
        let number = |variable: Variable| {
            let value = value(variable);
            ((value - value.round()).abs() < 1e-4).then(|| value.round().max(0.0) as usize)
        };
        let ends = |ends: &[Vec<Option<Variable>>]| -> Option<[Vec<usize>; SPANS]> {
            let of_span = |span: usize| -> Option<Vec<usize>> {
                ends[span].iter().map(|end| end.map_or(Some(0), number)).collect()
            };
            Some([of_span(0)?, of_span(1)?, of_span(2)?, of_span(3)?])
        };
        let counts: Option<Vec<Vec<usize>>> =
            self.counts.iter().map(|counts| counts.iter().map(|&count| number(count)).collect()).collect();
        let flows: Option<Vec<Flow>> = (self.from.iter().zip(&self.to))
            .map(|(from, to)| Some(Flow { from: ends(from)?, to: ends(to)? }))
            .collect();
        let plan = Plan { counts: counts?, flows: flows? };
        p3.holds(&plan).then_some(plan)
    }
}

/// Where a group's connections can be of a span: not if a smaller cluster has the same groups.
fn useful_spans(p3: &P3) -> [Vec<bool>; SPANS] {
    let groups_of = |span: usize, cluster: usize| {
        p3.groups.iter().filter(|group| group.clusters[span] == Some(cluster)).count()
    };
    let is_useful = |span: usize, group: usize| {
        let clusters = &p3.groups[group].clusters;
        let Some(cluster) = clusters[span] else { return false };
        match (0..span).rev().find_map(|smaller| clusters[smaller].map(|it| (smaller, it))) {
            Some((smaller, inner)) => groups_of(smaller, inner) < groups_of(span, cluster),
            None => true,
        }
    };
    std::array::from_fn(|span| (0..p3.groups.len()).map(|group| is_useful(span, group)).collect())
}

/// Pairs of groups that can change names: each is the only one below its edge switch, and both are below the same aggregation
/// switch, or each below one of its own.
fn alike(p3: &P3) -> Vec<(usize, usize)> {
    let is_alone = |index: usize, span: usize| {
        let cluster = p3.groups[index].clusters[span];
        p3.groups.iter().filter(|group| group.clusters[span] == cluster).count() == 1
    };
    let mut chains: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, group) in p3.groups.iter().enumerate() {
        if group.clusters[1].is_some() && is_alone(index, 1) {
            let aggregation = if is_alone(index, 2) { None } else { group.clusters[2] };
            let in_hosts = group.clusters[0].is_some();
            let key = (aggregation, in_hosts, group.can_relay, group.members.len(), group.root_cost);
            chains.entry(key).or_default().push(index);
        }
    }
    let pairs = |chain: &Vec<usize>| chain.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>();
    chains.values().flat_map(pairs).collect()
}
