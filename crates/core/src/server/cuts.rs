//! The copies of a shard's tables for one checkpoint, each made at the version that was ordered.

use super::table_shard::TableShard;
use crate::checkpoint::TableCut;
use crate::types::Clock;

/// The copies so far.
#[derive(Debug)]
pub(super) struct Cuts {
    at: Clock,
    /// By table.
    copies: Vec<Copy>,
    /// Tables that are to be copied.
    left: usize,
    /// Why there will be no copies.
    end: Option<CutOutcome>,
}

#[derive(Debug)]
enum Copy {
    /// Nothing of the table is here.
    None,
    Awaited,
    Made(TableCut),
}

/// What came of the copies.
#[derive(Debug)]
pub(super) enum CutOutcome {
    /// All of them are made.
    Made(Vec<TableCut>),
    /// A table is past the version, which is now this one.
    Missed(Clock),
    /// One could not be made; a sentence says why.
    Failed(String),
}

impl Cuts {
    /// Copies the tables that are at the version, or all of them as they are.
    pub(super) fn new(at: Clock, takes_all: bool, tables: &[TableShard]) -> Cuts {
        let place = |table: &TableShard| if table.elements() > 0 { Copy::Awaited } else { Copy::None };
        let left = tables.iter().filter(|table| table.elements() > 0).count();
        let mut cuts = Cuts { at, copies: tables.iter().map(place).collect(), left, end: None };
        for (number, table) in tables.iter().enumerate().filter(|(_, table)| table.elements() > 0) {
            let version = table.version();
            if !table.steps_by_rounds() {
                // Its versions are no states of its own: gradients are applied as they come.
                if version >= at || takes_all {
                    cuts.copy(number, table);
                }
            } else if version > at || version == at && table.is_between_versions() && !takes_all {
                cuts.end = Some(CutOutcome::Missed(version.max(at + 1)));
            } else if version == at {
                cuts.copy(number, table);
            }
        }
        if takes_all {
            cuts.take_all(tables);
        }
        cuts
    }

    /// A table has a new version, and nothing of the next one.
    pub(super) fn version_exists(&mut self, number: usize, table: &TableShard) {
        if table.version() >= self.at {
            self.copy(number, table);
        }
    }

    /// Copies what is left.
    pub(super) fn take_all(&mut self, tables: &[TableShard]) {
        tables.iter().enumerate().for_each(|(number, table)| self.copy(number, table));
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 || self.end.is_some()
    }

    pub(super) fn into_outcome(self) -> CutOutcome {
        let made = |copy| match copy {
            Copy::Made(copy) => Some(copy),
            Copy::None | Copy::Awaited => None,
        };
        let Cuts { copies, end, .. } = self;
        end.unwrap_or_else(|| CutOutcome::Made(copies.into_iter().filter_map(made).collect()))
    }

    fn copy(&mut self, number: usize, table: &TableShard) {
        if self.end.is_some() || !matches!(self.copies[number], Copy::Awaited) {
            return;
        }
        if !table.is_initialised() {
            let name = &table.spec().name;
            self.end = Some(CutOutcome::Failed(format!("table `{name}` has no initial values yet")));
            return;
        }
        match table.cut() {
            Ok(copy) => {
                self.copies[number] = Copy::Made(copy);
                self.left -= 1;
            }
            Err(why) => self.end = Some(CutOutcome::Failed(why)),
        }
    }
}
