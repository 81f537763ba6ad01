//! The placement axis: which server holds which part of which table.

use crate::registry::Axis;
use crate::types::ServerId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What placement knows about a table.
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
    /// Who holds it.
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
    Axis::new("placement", &[], Vec::new())
}
