//! A complete tree by rank, the same for all roots.

use super::{Broadcast, Forest, ForestError, Members, Parent, Tree};
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Broadcast> = Entry {
    name: "kary",
    about: "One complete tree by rank for all servers, in which every node has k children.",
    params: &[Param { name: "k", default: Some("4"), about: "Children of a node." }],
    example: "kary:k=4",
    build: |spec| {
        let spec = spec.with_positional("k")?;
        let tree: Kary = spec.config()?;
        spec.require(tree.k >= 1, || "k = 0: expected at least 1".into())?;
        Ok(Box::new(tree))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kary {
    #[serde(default = "default_k")]
    k: u32,
}

fn default_k() -> u32 {
    4
}

impl Broadcast for Kary {
    fn forest(&self, members: &Members<'_>) -> Result<Forest, ForestError> {
        Ok(kary(members, self.k as usize))
    }
}

/// Receivers level by level, those that can relay first. Leaves for which no relay has a place are left to the root.
pub(super) fn kary(members: &Members<'_>, k: usize) -> Forest {
    let (order, relays) = members.relays_first();
    let mut parents = vec![Parent::Root; order.len()];
    for (place, &receiver) in order.iter().enumerate().skip(k) {
        let above = place / k - 1;
        if above < relays {
            parents[receiver as usize] = Parent::Receiver(order[above] as usize);
        }
    }
    Forest::shared(Tree::new(parents).expect("each is below an earlier one"), members.roots.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broadcast::{Receiver, Topology};

    /// The parents of a tree as text: `.` is the root.
    fn shown(can_relay: &[bool], k: usize) -> String {
        let topology = Topology::default();
        let receivers: Vec<Receiver> =
            can_relay.iter().map(|&can_relay| Receiver { site: topology.site("a"), can_relay }).collect();
        let members = Members { roots: &[topology.site("b")], receivers: &receivers, topology: &topology };
        let forest = kary(&members, k);
        forest.check(&members).unwrap();
        let parent = |receiver| match forest.parent(0, receiver) {
            Parent::Root => ".".to_owned(),
            Parent::Receiver(parent) => parent.to_string(),
        };
        (0..receivers.len()).map(parent).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn levels_are_filled_by_rank() {
        assert_eq!(shown(&[true; 7], 2), ". . 0 0 1 1 2");
        assert_eq!(shown(&[true; 4], 1), ". 0 1 2");
        assert_eq!(shown(&[true; 3], 4), ". . .");
        assert_eq!(shown(&[], 2), "");
    }

    #[test]
    fn leaves_come_last_and_fall_to_the_root_where_no_relay_has_a_place() {
        assert_eq!(shown(&[false, true, true, true], 2), "1 . . 1");
        assert_eq!(shown(&[false, true, false, false, false], 1), "1 . . . .");
        assert_eq!(shown(&[false, false, false], 2), ". . .");
    }
}
