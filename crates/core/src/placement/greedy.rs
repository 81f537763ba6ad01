//! Greedy: whole tables to the least loaded server, in creation order.

use super::{Part, Placement, TableSize, whole};
use crate::registry::Entry;
use serde::Deserialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub(super) const ENTRY: Entry<dyn Placement> = Entry {
    name: "greedy",
    about: "Gives whole tables, as they were created, to the server with the fewest bytes so far.",
    params: &[],
    example: "greedy",
    build: |spec| Ok(Box::new(spec.config::<Greedy>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Greedy {}

impl Placement for Greedy {
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>> {
        place_in_order(0..tables.len(), tables, servers)
    }
}

/// Gives each table, in this order, to the least loaded server; of equals, to the one with the lowest number.
pub(super) fn place_in_order(
    order: impl IntoIterator<Item = usize>,
    tables: &[TableSize],
    servers: u32,
) -> Vec<Vec<Part>> {
    let mut least_loaded: BinaryHeap<Reverse<(u64, u32)>> =
        (0..servers).map(|server| Reverse((0, server))).collect();
    let mut parts = vec![Vec::new(); tables.len()];
    for index in order {
        let mut least = least_loaded.peek_mut().expect("a job has at least one server");
        let Reverse((load, server)) = *least;
        parts[index] = whole(&tables[index], server);
        *least = Reverse((load + tables[index].elements, server));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_loaded_server_is_next_and_ties_go_to_the_lowest() {
        let tables: Vec<TableSize> = [1, 1, 5, 2, 2, 3].map(|elements| TableSize { elements, row: 1 }).into();
        let servers: Vec<u32> = Greedy {}.place(&tables, 2).iter().map(|parts| parts[0].server.0).collect();
        // Loads after each: 1/0, 1/1, 6/1, 6/3, 6/5, 6/8.
        assert_eq!(servers, [0, 1, 0, 1, 1, 1]);
    }
}
