//! Round-robin: whole tables in turn, TensorFlow's default.

use super::{Part, Placement, TableSize, whole};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Placement> = Entry {
    name: "round_robin",
    about: "Gives whole tables to the servers in turn, whatever their size.",
    params: &[],
    example: "round_robin",
    build: |spec| Ok(Box::new(spec.config::<RoundRobin>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RoundRobin {}

impl Placement for RoundRobin {
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>> {
        tables.iter().zip((0..servers).cycle()).map(|(table, server)| whole(table, server)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_take_turns() {
        let tables: Vec<TableSize> = [9, 1, 4, 4, 2].map(|elements| TableSize { elements, row: 1 }).into();
        let servers: Vec<u32> =
            RoundRobin {}.place(&tables, 3).iter().map(|parts| parts[0].server.0).collect();
        assert_eq!(servers, [0, 1, 2, 0, 1]);
    }
}
