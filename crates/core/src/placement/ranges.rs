//! Contiguous key ranges, PS-Lite's default slicing: the baseline that FluentPS compares its slicing with (section III-A).

use super::{Part, Placement, TableSize, whole};
use crate::registry::Entry;
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Placement> = Entry {
    name: "ranges",
    about: "Cuts the tables' numbers into one contiguous range per server, as PS-Lite does with keys: a baseline, uneven where tables are.",
    params: &[],
    example: "ranges",
    build: |spec| Ok(Box::new(spec.config::<Ranges>()?)),
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ranges {}

impl Placement for Ranges {
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>> {
        // A table is a key. Ranges have equally many keys, however many bytes these stand for.
        let (count, servers) = (tables.len() as u64, u64::from(servers));
        let server = |key: u64| (key * servers / count) as u32;
        tables.iter().zip(0..).map(|(table, key)| whole(table, server(key))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::loads;

    fn tables(sizes: &[u64]) -> Vec<TableSize> {
        sizes.iter().map(|&elements| TableSize { elements, row: 1 }).collect()
    }

    #[test]
    fn a_server_gets_neighbouring_tables_and_as_many_as_any_other() {
        let servers = |count: usize, servers| -> Vec<u32> {
            Ranges {}.place(&tables(&vec![1; count]), servers).iter().map(|parts| parts[0].server.0).collect()
        };
        assert_eq!(servers(6, 3), [0, 0, 1, 1, 2, 2]);
        assert_eq!(servers(5, 2), [0, 0, 0, 1, 1]);
        assert_eq!(servers(2, 4), [0, 2]);
    }

    /// The imbalance that FluentPS reports: most of a convolutional network's parameters are in its last layers.
    #[test]
    fn the_server_of_the_large_tables_has_most_of_the_model() {
        let vgg = tables(&[1728, 36_864, 73_728, 294_912, 589_824, 102_760_448, 16_777_216, 4_096_000]);
        let loads = loads(&Ranges {}.place(&vgg, 2), 2);
        assert!(loads[1] > 300 * loads[0], "{loads:?}");
    }
}
