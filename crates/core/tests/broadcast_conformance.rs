//! What every registered broadcast must keep. A new topology is tested by being registered.

use paramill_core::broadcast::{Broadcast, Forest, ForestError, Members, Parent, Receiver, Site, Topology};
use paramill_core::prng::Prng;
use paramill_core::registry::{Axis, Registry};
use paramill_core::spec::Spec;
use proptest::prelude::*;

fn axis() -> Axis<dyn Broadcast> {
    Registry::builtin().broadcast
}

fn build(text: &str) -> Box<dyn Broadcast> {
    let spec = Spec::parse(text).expect("an example parses");
    axis().build(&spec).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn all() -> Vec<(&'static str, Box<dyn Broadcast>)> {
    axis().entries().iter().map(|entry| (entry.name, build(entry.example))).collect()
}

/// Roots and receivers at sites of a small network.
#[derive(Debug, Clone)]
struct Job {
    topology: Topology,
    roots: Vec<Site>,
    receivers: Vec<Receiver>,
}

impl Job {
    fn new(topology: &str, roots: &[u32], receivers: &[(u32, bool)]) -> Job {
        let topology = Topology::parse(topology).expect("the network is well formed");
        let site = |number: u32| topology.site(&format!("host{number}"));
        Job {
            roots: roots.iter().map(|&root| site(root)).collect(),
            receivers: (receivers.iter())
                .map(|&(number, can_relay)| Receiver { site: site(number), can_relay })
                .collect(),
            topology,
        }
    }

    fn members(&self) -> Members<'_> {
        Members { roots: &self.roots, receivers: &self.receivers, topology: &self.topology }
    }

    fn plant(&self, broadcast: &dyn Broadcast) -> Result<Forest, ForestError> {
        broadcast.forest(&self.members())
    }
}

/// Six racks of four hosts, in three rows. Hosts from 24 on are not in it.
fn network(edge_oversubscription: f64) -> String {
    let rack = |number: u32| {
        let hosts: Vec<String> = (0..4).map(|host| format!("'host{}'", number * 4 + host)).collect();
        let row = number / 2;
        format!("[[edge]]\nname='rack{number}'\naggregation='row{row}'\nhosts=[{}]\n", hosts.join(","))
    };
    let racks: String = (0..6).map(rack).collect();
    format!("[oversubscription]\nedge={edge_oversubscription}\n{racks}")
}

fn any_job() -> impl Strategy<Value = Job> {
    let host = || 0u32..30;
    let relays = prop_oneof![Just(1.0), 0.0..1.0];
    let oversubscription = prop_oneof![Just(1.0), Just(8.0)];
    (
        prop::collection::vec(host(), 1..8),
        prop::collection::vec((host(), 0.0..1.0), 0..40),
        relays,
        oversubscription,
    )
        .prop_map(|(roots, receivers, relays, oversubscription)| {
            let receivers: Vec<(u32, bool)> =
                receivers.into_iter().map(|(host, chance)| (host, chance < relays)).collect();
            Job::new(&network(oversubscription), &roots, &receivers)
        })
}

/// Whether bounds are the reason that there is no forest.
fn has_no_room(error: &ForestError) -> bool {
    matches!(error, ForestError::NoRoom { .. })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_root_has_a_tree_of_all_receivers(job in any_job()) {
        for (name, broadcast) in all() {
            match job.plant(&*broadcast) {
                Ok(forest) => {
                    prop_assert_eq!(forest.check(&job.members()), Ok(()), "{}", name);
                    for root in 0..job.roots.len() {
                        // Each is a child of exactly one node, and one hop below it.
                        let mut met = vec![0; job.receivers.len()];
                        let nodes = (0..job.receivers.len()).map(Parent::Receiver).chain([Parent::Root]);
                        for node in nodes {
                            let depth = match node {
                                Parent::Root => 0,
                                Parent::Receiver(receiver) => forest.tree(root).depth_of(receiver),
                            };
                            for child in forest.children(root, node) {
                                met[child] += 1;
                                prop_assert_eq!(forest.parent(root, child), node);
                                prop_assert_eq!(forest.tree(root).depth_of(child), depth + 1);
                            }
                        }
                        prop_assert!(met.iter().all(|&met| met == 1), "{}: {:?}", name, met);
                    }
                }
                Err(error) => prop_assert!(has_no_room(&error), "{}: {}", name, error),
            }
        }
    }

    #[test]
    fn the_same_members_get_the_same_forest(job in any_job()) {
        for ((name, one), (_, other)) in all().into_iter().zip(all()) {
            prop_assert_eq!(job.plant(&*one), job.plant(&*other), "{}", name);
        }
    }

    /// A tree within the bounds, or a sentence that says how many fit.
    #[test]
    fn bounds_are_kept_or_refused(job in any_job(), degree in 1usize..6, depth in 1usize..6) {
        let result = job.plant(&*build(&format!("tree:degree={degree},depth={depth}")));
        match result {
            Ok(forest) => {
                prop_assert!(forest.depth() <= depth);
                prop_assert!(forest.tree(0).degree() <= degree);
                prop_assert!(forest.children(0, Parent::Root).len() <= degree);
                prop_assert!(forest.quality().is_some_and(|quality| quality.bound <= quality.cost));
            }
            Err(ForestError::NoRoom { room, receivers, .. }) => prop_assert!(room < receivers),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    /// Only leaves for which no relay has a place are more than a node may have, and they are the root's.
    #[test]
    fn degrees_without_a_bound_on_depth_are_kept_by_relays(job in any_job(), degree in 1usize..6) {
        for text in [format!("kary:k={degree}"), format!("rotated:degree={degree}"), "chain".into()] {
            let most = if text == "chain" { 1 } else { degree };
            let forest = job.plant(&*build(&text)).unwrap();
            for root in 0..job.roots.len() {
                prop_assert!(forest.tree(root).degree() <= most, "{}", text);
            }
        }
    }
}

#[test]
fn without_receivers_there_is_nothing_in_the_trees() {
    let job = Job::new("", &[0, 1], &[]);
    for (name, broadcast) in all() {
        let forest = job.plant(&*broadcast).unwrap();
        forest.check(&job.members()).unwrap();
        assert_eq!((forest.depth(), forest.children(1, Parent::Root).len()), (0, 0), "{name}");
    }
}

/// Where nobody can relay, a tree without a bound on the root is a star.
#[test]
fn receivers_that_nobody_can_reach_are_the_roots() {
    let job = Job::new("", &[0], &[(1, false), (2, false), (3, false)]);
    for (name, broadcast) in all() {
        assert_eq!(job.plant(&*broadcast).unwrap().depth(), 1, "{name}");
    }
}

#[test]
fn a_thousand_receivers() {
    let mut prng = Prng::new(5);
    let receivers: Vec<(u32, bool)> = (0..1000).map(|_| (prng.below(60) as u32, prng.chance(0.9))).collect();
    let job = Job::new(&network(4.0), &[1, 5, 9, 30, 31, 32], &receivers);
    for (name, broadcast) in all() {
        match job.plant(&*broadcast) {
            Ok(forest) => forest.check(&job.members()).unwrap(),
            Err(error) => assert_eq!(
                (name, error.to_string()),
                (
                    "tree",
                    "a tree with degree=5, depth=3 has room for 155 of these 1000 receivers, of which 882 can relay; raise \
                     degree or depth"
                        .to_owned()
                )
            ),
        }
    }
}

#[test]
fn every_entry_is_described_and_refuses_what_it_does_not_know() {
    let axis = axis();
    for entry in axis.entries() {
        assert!(entry.about.ends_with('.'), "{}: {}", entry.name, entry.about);
        assert_eq!(Spec::parse(entry.example).unwrap().name, entry.name);
        let error = axis.build(&Spec::parse(&format!("{}:colour=blue", entry.name)).unwrap()).unwrap_err();
        assert!(error.to_string().contains("colour"), "{error}");
    }
    let refused = |text: &str| axis.build(&Spec::parse(text).unwrap()).unwrap_err().to_string();
    assert_eq!(
        refused("ring"),
        "unknown broadcast `ring`; known: none, star, chain, kary, tree, rotated, auto"
    );
    assert_eq!(refused("kary:0"), "kary: k = 0: expected at least 1");
    assert_eq!(refused("rotated:degree=0"), "rotated: degree = 0: expected at least 1");
    assert_eq!(refused("tree:degree=0"), "tree: degree = 0: expected 1 to 16384");
    assert_eq!(refused("tree:depth=20000"), "tree: depth = 20000: expected 1 to 16384");
    assert_eq!(refused("tree:alpha=-1"), "tree: alpha = -1: expected 0 to 1000000");
    assert_eq!(refused("tree:alpha=NaN"), "tree: alpha = NaN: expected 0 to 1000000");
}

#[test]
fn only_none_does_not_publish() {
    let silent: Vec<&str> = all().iter().filter(|(_, it)| !it.publishes()).map(|(name, _)| *name).collect();
    assert_eq!(silent, ["none"]);
}
