//! Heuristic multi-way number partitioning, MPS Algorithm 2: the largest tables first.

use super::greedy::place_in_order;
use super::{Part, Placement, TableSize};
use crate::registry::Entry;
use serde::Deserialize;
use std::cmp::Reverse;

pub(super) const ENTRY: Entry<dyn Placement> = Entry {
    name: "heuristic",
    about: "Gives whole tables, the largest first, to the server with the fewest bytes so far.",
    params: &[],
    example: "heuristic",
    build: |spec| Ok(Box::new(spec.config::<Heuristic>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Heuristic {}

impl Placement for Heuristic {
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>> {
        let mut order: Vec<usize> = (0..tables.len()).collect();
        // The sort is stable: tables of one size stay in creation order.
        order.sort_by_key(|&index| Reverse(tables[index].elements));
        place_in_order(order, tables, servers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::loads;
    use proptest::prelude::*;

    fn tables(sizes: &[u64]) -> Vec<TableSize> {
        sizes.iter().map(|&elements| TableSize { elements, row: 1 }).collect()
    }

    #[test]
    fn the_largest_go_first_and_equals_in_creation_order() {
        let servers: Vec<u32> =
            Heuristic {}.place(&tables(&[2, 3, 7, 3, 2]), 3).iter().map(|parts| parts[0].server.0).collect();
        // 7 to 0, 3 to 1, 3 to 2, then 2 to 1 and 2 to 2.
        assert_eq!(servers, [1, 1, 0, 2, 2]);
    }

    /// The smallest possible largest load, by trying everything.
    fn optimum(sizes: &[u64], loads: &mut [u64]) -> u64 {
        let Some((&size, rest)) = sizes.split_first() else {
            return loads.iter().copied().max().unwrap_or(0);
        };
        let mut best = u64::MAX;
        for server in 0..loads.len() {
            loads[server] += size;
            best = best.min(optimum(rest, loads));
            loads[server] -= size;
        }
        best
    }

    proptest! {
        /// Graham 1969: the largest-first rule is within 4/3 - 1/(3m) of the optimum.
        #[test]
        fn within_four_thirds_of_the_optimum(sizes in prop::collection::vec(1u64..100, 1..9), servers in 1u32..4) {
            let given = *loads(&Heuristic {}.place(&tables(&sizes), servers), servers).iter().max().unwrap();
            let best = optimum(&sizes, &mut vec![0; servers as usize]);
            let m = u64::from(servers);
            prop_assert!(3 * m * given <= (4 * m - 1) * best, "{} against {}", given, best);
        }
    }
}
