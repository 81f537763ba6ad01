//! An instance of P3 as a line of text.

use paramill_core::broadcast::{Members, P3, Parent, Receiver, Site, Topology};
use paramill_core::prng::Prng;
use std::fmt;

/// Where a node is: numbers of aggregation switch, edge switch and host.
type Place = [u64; 3];

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Instance {
    roots: Vec<Place>,
    receivers: Vec<(Place, bool)>,
    pub(crate) degree: usize,
    pub(crate) depth: usize,
    alpha: f64,
    /// Same host, same edge, same aggregation, across.
    costs: [f64; 4],
}

impl Instance {
    /// The instances of a file, with their optima.
    pub(crate) fn read(text: &str) -> Vec<(Instance, f64)> {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let read = |line: &str| {
            let (instance, optimum) = line.split_once(" = ").expect("an instance has an optimum");
            (Instance::parse(instance), optimum.parse().expect("the line is well formed"))
        };
        lines.map(read).collect()
    }

    fn parse(line: &str) -> Instance {
        let fields: Vec<Vec<&str>> =
            line.split(';').map(|field| field.split_whitespace().collect()).collect();
        let place = |text: &str| -> Place {
            let numbers: Vec<u64> = text
                .trim_end_matches('*')
                .split('.')
                .map(|it| it.parse().expect("the line is well formed"))
                .collect();
            numbers.try_into().expect("the line is well formed")
        };
        let [roots, receivers, bounds, costs] = &fields[..] else { panic!("{line}") };
        let costs: Vec<f64> =
            costs.iter().map(|cost| cost.parse().expect("the line is well formed")).collect();
        Instance {
            roots: roots.iter().map(|root| place(root)).collect(),
            receivers: receivers.iter().map(|it| (place(it), !it.ends_with('*'))).collect(),
            degree: bounds[0].parse().expect("the line is well formed"),
            depth: bounds[1].parse().expect("the line is well formed"),
            alpha: bounds[2].parse().expect("the line is well formed"),
            costs: costs.try_into().expect("the line is well formed"),
        }
    }

    /// An instance of so many receivers, from a seed.
    pub(crate) fn draw(seed: u64, receivers: usize) -> Instance {
        let mut prng = Prng::fork(seed, 0x7033);
        let aggregations = 1 + prng.below(3);
        let edges = 1 + prng.below(3);
        let mut place = || [prng.below(aggregations), prng.below(edges), prng.below(3)];
        let roots = (0..1 + seed % 4).map(|_| place()).collect();
        let places: Vec<Place> = (0..receivers).map(|_| place()).collect();
        let leaves = if prng.chance(0.3) { 0.3 } else { 0.0 };
        let receivers = places.into_iter().map(|place| (place, !prng.chance(leaves))).collect();
        let mut of = |choices: &[f64]| choices[prng.below(choices.len() as u64) as usize];
        let costs = [[0.1, 0.1, 0.5, 1.0], [0.1, 0.1, 0.5, 1.0], [0.0, 0.2, 0.3, 2.0]];
        Instance {
            roots,
            receivers,
            degree: of(&[1.0, 2.0, 2.0, 3.0, 5.0]) as usize,
            depth: of(&[1.0, 2.0, 3.0, 3.0, 4.0]) as usize,
            alpha: of(&[0.0, 0.1, 0.5, 2.0]),
            costs: costs[of(&[0.0, 1.0, 2.0]) as usize],
        }
    }

    pub(crate) fn receivers(&self) -> usize {
        self.receivers.len()
    }

    pub(crate) fn can_relay(&self, receiver: usize) -> bool {
        self.receivers[receiver].1
    }

    /// What a tree costs, by eq. 12.
    pub(crate) fn cost(&self, parents: &[Parent]) -> f64 {
        let connections: f64 =
            parents.iter().enumerate().map(|(receiver, &parent)| self.connection(parent, receiver)).sum();
        let is_leaf = |&receiver: &usize| !parents.contains(&Parent::Receiver(receiver));
        connections + self.alpha * (0..parents.len()).filter(is_leaf).count() as f64
    }

    /// Cost of one connection; the root stands for all of them.
    pub(crate) fn connection(&self, parent: Parent, receiver: usize) -> f64 {
        let to = self.receivers[receiver].0;
        match parent {
            Parent::Root => self.roots.iter().map(|&root| self.between(root, to)).sum(),
            Parent::Receiver(parent) => self.between(self.receivers[parent].0, to),
        }
    }

    fn between(&self, one: Place, other: Place) -> f64 {
        let common = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
        self.costs[3 - common]
    }

    pub(crate) fn p3(&self) -> P3 {
        self.with_members(|members| {
            P3::new(members, self.degree, self.depth, self.alpha).expect("a golden instance has a tree")
        })
    }

    /// Whether there is a tree within the bounds.
    pub(crate) fn has_room(&self) -> bool {
        self.with_members(|members| P3::new(members, self.degree, self.depth, self.alpha).is_ok())
    }

    pub(crate) fn with_members<T>(&self, then: impl FnOnce(&Members<'_>) -> T) -> T {
        let [same_host, same_edge, same_aggregation, across] = self.costs;
        let topology = Topology::parse(&format!(
            "[costs]\nsame_host = {same_host}\nsame_edge = {same_edge}\nsame_aggregation = {same_aggregation}\nacross = {across}"
        ));
        // An edge switch has a name of its own in the whole network, and so has a host.
        let site = |[aggregation, edge, host]: Place| {
            let edge = aggregation * 1000 + edge;
            Site { host: edge * 1000 + host, edge, aggregation }
        };
        let roots: Vec<Site> = self.roots.iter().map(|&root| site(root)).collect();
        let receivers: Vec<Receiver> = self
            .receivers
            .iter()
            .map(|&(place, can_relay)| Receiver { site: site(place), can_relay })
            .collect();
        then(&Members { roots: &roots, receivers: &receivers, topology: &topology.expect("costs ascend") })
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for [aggregation, edge, host] in &self.roots {
            write!(f, "{aggregation}.{edge}.{host} ")?;
        }
        write!(f, ";")?;
        for ([aggregation, edge, host], can_relay) in &self.receivers {
            write!(f, " {aggregation}.{edge}.{host}{}", if *can_relay { "" } else { "*" })?;
        }
        write!(f, "; {} {} {};", self.degree, self.depth, self.alpha)?;
        self.costs.iter().try_for_each(|cost| write!(f, " {cost}"))
    }
}
