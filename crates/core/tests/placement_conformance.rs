//! What every registered placement must keep. A new strategy is tested by being registered.

use paramill_core::placement::{Part, Placement, TableSize, loads};
use paramill_core::prng::Prng;
use paramill_core::registry::{Axis, Registry};
use paramill_core::spec::Spec;
use proptest::prelude::*;

fn axis() -> Axis<dyn Placement> {
    Registry::builtin().placement
}

fn all() -> Vec<(&'static str, Box<dyn Placement>)> {
    let axis = axis();
    let build = |text: &str| {
        axis.build(&Spec::parse(text).expect("an example parses"))
            .unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    axis.entries().iter().map(|entry| (entry.name, build(entry.example))).collect()
}

/// The contract of [`Placement::place`], as a sentence when it is broken.
fn check(tables: &[TableSize], servers: u32, parts: &[Vec<Part>]) -> Result<(), String> {
    if parts.len() != tables.len() {
        return Err(format!("{} tables, parts of {}", tables.len(), parts.len()));
    }
    for (index, (table, parts)) in tables.iter().zip(parts).enumerate() {
        let mut next = 0;
        for part in parts {
            if part.start != next {
                return Err(format!("table {index}: a part starts at {} instead of {next}", part.start));
            }
            if part.len == 0 || part.len % table.row != 0 {
                return Err(format!("table {index}: a part of {} elements, rows of {}", part.len, table.row));
            }
            if part.server.0 >= servers {
                return Err(format!("table {index}: {} of {servers}", part.server));
            }
            next += part.len;
        }
        if next != table.elements {
            return Err(format!("table {index}: {next} of {} elements are placed", table.elements));
        }
    }
    Ok(())
}

fn any_table() -> impl Strategy<Value = TableSize> {
    let rows = prop_oneof![1u64..10, 1u64..100_000];
    (rows, prop_oneof![Just(1u64), 1u64..200]).prop_map(|(rows, row)| TableSize { elements: rows * row, row })
}

proptest! {
    #[test]
    fn tables_are_covered_once_by_whole_rows_on_servers_that_exist(
        tables in prop::collection::vec(any_table(), 0..60),
        servers in prop_oneof![Just(1u32), 1u32..9, 1u32..300],
    ) {
        for (name, placement) in all() {
            let parts = placement.place(&tables, servers);
            if let Err(why) = check(&tables, servers, &parts) {
                prop_assert!(false, "{}: {}", name, why);
            }
            let placed: u64 = loads(&parts, servers).iter().sum();
            prop_assert_eq!(placed, tables.iter().map(|table| table.elements).sum::<u64>());
        }
    }

    #[test]
    fn the_same_tables_are_placed_the_same(tables in prop::collection::vec(any_table(), 0..30), servers in 1u32..20) {
        for ((name, one), (_, other)) in all().into_iter().zip(all()) {
            prop_assert_eq!(one.place(&tables, servers), other.place(&tables, servers), "{}", name);
        }
    }
}

#[test]
fn thousands_of_tables() {
    let mut prng = Prng::new(5);
    let tables: Vec<TableSize> = (0..5000)
        .map(|_| {
            let row = 1 + prng.below(64);
            TableSize { elements: row * (1 + prng.below(10_000)), row }
        })
        .collect();
    for (name, placement) in all() {
        for servers in [1, 7, 1024] {
            check(&tables, servers, &placement.place(&tables, servers))
                .unwrap_or_else(|why| panic!("{name} on {servers} servers: {why}"));
        }
    }
}

#[test]
fn the_largest_table_allowed() {
    let tables = [TableSize { elements: paramill_core::limits::MAX_TABLE_ELEMENTS, row: 1 }; 3];
    for (name, placement) in all() {
        check(&tables, 1000, &placement.place(&tables, 1000)).unwrap_or_else(|why| panic!("{name}: {why}"));
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
    let error = axis.build(&Spec::parse("random").unwrap()).unwrap_err().to_string();
    assert_eq!(error, "unknown placement `random`; known: uniform, round_robin, greedy, heuristic, ranges");
}
