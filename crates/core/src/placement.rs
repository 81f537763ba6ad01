//! The placement axis: which server holds which part of which table.

mod greedy;
mod heuristic;
pub mod moves;
mod ranges;
mod round_robin;
mod uniform;

use crate::registry::Axis;
use crate::table::TableSpec;
use crate::types::{ServerId, TableId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A table's size, as placement sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableSize {
    /// Number of parameters, at least 1.
    pub elements: u64,
    /// Parameters that must stay together (a row of a sparse table, a table that is not cut; 1 when any cut will do).
    /// Divides `elements`.
    pub row: u64,
}

/// A contiguous range of one table on one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The server that holds it.
    pub server: ServerId,
    /// First element.
    pub start: u64,
    /// Number of elements, at least 1.
    pub len: u64,
}

/// A placement strategy. One method is required.
pub trait Placement: Send + Sync + fmt::Debug {
    /// The parts of every table, in the tables' order. The parts of a table MUST cover it without gap or overlap, in
    /// ascending order, each starting and ending at a row boundary, on servers below `servers` (at least 1). The
    /// result MUST follow from the arguments alone.
    fn place(&self, tables: &[TableSize], servers: u32) -> Vec<Vec<Part>>;
}

/// The choices of this axis.
pub fn axis() -> Axis<dyn Placement> {
    let entries = vec![uniform::ENTRY, round_robin::ENTRY, greedy::ENTRY, heuristic::ENTRY, ranges::ENTRY];
    Axis::new("placement", &[], entries)
}

/// The parts of a job's tables. Those of `whole`, ascending, are not cut, whatever the strategy.
pub fn place_tables(
    strategy: &dyn Placement,
    tables: &[TableSpec],
    whole: &[TableId],
    servers: u32,
) -> Vec<Vec<Part>> {
    let size = |(number, table): (u32, &TableSpec)| {
        let elements = table.elements();
        let is_whole = whole.binary_search(&TableId(number)).is_ok();
        TableSize { elements, row: if is_whole { elements } else { table.row_elements() } }
    };
    let sizes: Vec<TableSize> = (0..).zip(tables).map(size).collect();
    strategy.place(&sizes, servers)
}

/// Elements on each of `servers` servers.
pub fn loads(parts: &[Vec<Part>], servers: u32) -> Vec<u64> {
    let mut loads = vec![0; servers as usize];
    for part in parts.iter().flatten() {
        loads[part.server.0 as usize] += part.len;
    }
    loads
}

/// Standard deviation over mean: 0 when all loads are equal, and when there is no load at all.
pub fn coefficient_of_variation(loads: &[u64]) -> f64 {
    let count = loads.len() as f64;
    let mean = loads.iter().sum::<u64>() as f64 / count;
    if loads.is_empty() || mean == 0.0 {
        return 0.0;
    }
    let variance = loads.iter().map(|&load| (load as f64 - mean).powi(2)).sum::<f64>() / count;
    variance.sqrt() / mean
}

/// A table in one piece.
fn whole(table: &TableSize, server: u32) -> Vec<Part> {
    vec![Part { server: ServerId(server), start: 0, len: table.elements }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_is_needed_whole_is_cut_by_no_strategy() {
        let tables = ["a", "b", "c", "d"].map(|name| TableSpec::dense(name, [1000]));
        for entry in axis().entries() {
            let strategy = (entry.build)(&crate::spec::Spec::parse(entry.example).unwrap()).unwrap();
            let parts = place_tables(&*strategy, &tables, &[TableId(1), TableId(3)], 4);
            assert_eq!([parts[1].len(), parts[3].len()], [1, 1], "{}", entry.name);
            assert_ne!(parts[1][0].server, parts[3][0].server, "{}", entry.name);
            assert!(entry.name != "uniform" || parts[0].len() == 4);
        }
    }

    #[test]
    fn loads_add_up_the_parts_of_a_server() {
        let part = |server, len| Part { server: ServerId(server), start: 0, len };
        assert_eq!(loads(&[vec![part(0, 5), part(2, 7)], vec![part(2, 1)]], 3), [5, 0, 8]);
    }

    #[test]
    fn coefficient_of_variation_known_answers() {
        assert_eq!(coefficient_of_variation(&[]), 0.0);
        assert_eq!(coefficient_of_variation(&[0, 0]), 0.0);
        assert_eq!(coefficient_of_variation(&[7, 7, 7]), 0.0);
        // Mean 5, deviations 2 and -2.
        assert_eq!(coefficient_of_variation(&[7, 3]), 0.4);
        assert_eq!(coefficient_of_variation(&[4, 0, 0, 0]), 3f64.sqrt());
    }
}
