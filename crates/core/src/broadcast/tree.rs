//! The tree of least cost for all roots: problem P3 of Parameter Flow (section 3.4.1, eq. 12 to 21).

mod milp;
mod p3;
mod search;

pub use p3::{P3, Solved};

use super::{Broadcast, Forest, ForestError, Members};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "tree",
    about: "One tree for all servers, of the least cost by the topology, in which degree and depth are bounded.",
    params: &[
        Param { name: "degree", default: Some("5"), about: "Children of a node at most." },
        Param { name: "depth", default: Some("3"), about: "Hops from a server to a receiver at most." },
        Param {
            name: "alpha",
            default: Some("0.1"),
            about: "Cost of a receiver that does not relay: more of it gives more relays with fewer children each.",
        },
    ],
    example: "tree:degree=5,depth=3",
    build: |spec| {
        let tree: LeastCost = spec.config()?;
        for (name, value) in [("degree", tree.degree), ("depth", tree.depth)] {
            spec.require((1..=LARGEST).contains(&value), || {
                format!("{name} = {value}: expected 1 to {LARGEST}")
            })?;
        }
        spec.require((0.0..=1e6).contains(&tree.alpha), || {
            format!("alpha = {}: expected 0 to 1000000", tree.alpha)
        })?;
        Ok(Box::new(tree))
    },
};

/// The largest degree and depth: as many as a job may have workers.
const LARGEST: u32 = crate::limits::MAX_WORKERS;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeastCost {
    #[serde(default = "default_degree")]
    degree: u32,
    #[serde(default = "default_depth")]
    depth: u32,
    #[serde(default = "default_alpha")]
    alpha: f64,
}

fn default_degree() -> u32 {
    5
}

fn default_depth() -> u32 {
    3
}

fn default_alpha() -> f64 {
    0.1
}

impl Broadcast for LeastCost {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        least_cost(members, self.degree as usize, self.depth as usize, self.alpha)
    }
}

/// The tree of least cost within these bounds, or the best one that was found.
fn least_cost(members: &Members<'_>, degree: usize, depth: usize, alpha: f64) -> Result<Forest, ForestError> {
    let Solved { tree, quality } = P3::new(members, degree, depth, alpha)?.solve();
    Ok(Forest::shared(tree, members.roots.len()).with_quality(quality))
}

/// The same with the degree of the paper's experiments, as flat as these receivers allow.
pub(super) fn flattest(members: &Members<'_>) -> Result<Forest, ForestError> {
    let (degree, receivers) = (default_degree() as usize, members.receivers.len());
    let relays = members.receivers.iter().filter(|receiver| receiver.can_relay).count();
    let has_room = |&depth: &usize| p3::room(degree, degree, depth, relays) >= receivers;
    least_cost(members, degree, (1..=receivers).find(has_room).unwrap_or(1), default_alpha())
}
