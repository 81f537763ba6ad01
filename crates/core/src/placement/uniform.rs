//! Uniform split: every table is cut evenly over all servers.

use super::{Part, Placement, TableSize};
use crate::registry::Entry;
use crate::types::ServerId;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Placement> = Entry {
    name: "uniform",
    about: "Cuts every table evenly over all servers: balanced, with a message per server for every table.",
    params: &[],
    example: "uniform",
    build: |spec| Ok(Box::new(spec.config::<Uniform>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Uniform {}

impl Placement for Uniform {
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>> {
        // The servers that get a row more than others go in turn. A table with fewer rows than servers is all such
        // rows, so small tables spread too instead of piling up on server 0.
        let mut turn = 0;
        let mut parts_of_tables = Vec::with_capacity(tables.len());
        for table in tables {
            let rows = table.elements / table.row;
            let (base, extra) = (rows / u64::from(servers), (rows % u64::from(servers)) as u32);
            let mut parts = Vec::new();
            let mut start = 0;
            for i in 0..servers {
                let len = (base + u64::from(i < extra)) * table.row;
                if len > 0 {
                    parts.push(Part { server: ServerId((turn + i) % servers), start, len });
                }
                start += len;
            }
            parts_of_tables.push(parts);
            turn = (turn + extra) % servers;
        }
        parts_of_tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::loads;

    #[test]
    fn the_remainder_goes_round() {
        let table = |elements, row| TableSize { elements, row };
        let parts = Uniform {}.place(&[table(10, 1), table(2, 1), table(9, 3)], 4);
        let shown: Vec<Vec<(u32, u64, u64)>> = parts
            .iter()
            .map(|parts| parts.iter().map(|part| (part.server.0, part.start, part.len)).collect())
            .collect();
        assert_eq!(
            shown,
            [
                vec![(0, 0, 3), (1, 3, 3), (2, 6, 2), (3, 8, 2)],
                vec![(2, 0, 1), (3, 1, 1)],
                vec![(0, 0, 3), (1, 3, 3), (2, 6, 3)],
            ]
        );
    }

    #[test]
    fn tables_of_equal_rows_leave_servers_within_one_row() {
        let tables: Vec<TableSize> = (1..200).map(|rows| TableSize { elements: rows * 5, row: 5 }).collect();
        for servers in 1..20 {
            let loads = loads(&Uniform {}.place(&tables, servers), servers);
            assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 5, "{loads:?}");
        }
    }
}
