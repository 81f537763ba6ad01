//! The placement axis: which server holds which part of which table.

mod greedy;
mod heuristic;
mod round_robin;
mod uniform;

use crate::registry::Axis;
use crate::types::ServerId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A table's size, as placement sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableSize {
    /// Number of parameters, at least 1.
    pub elements: u64,
    /// Parameters that must stay together (a row of a sparse table; 1 when any cut will do). Divides `elements`.
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
    Axis::new("placement", &[], vec![uniform::ENTRY, round_robin::ENTRY, greedy::ENTRY, heuristic::ENTRY])
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
