//! When tables want to be settled though nothing happened.

use crate::types::Time;
use std::collections::BTreeSet;

/// At most one time for each table.
#[derive(Debug, Default)]
pub(super) struct Timers {
    by_time: BTreeSet<(Time, usize)>,
    /// The time of each table, as it stands in `by_time`.
    of_table: Vec<Option<Time>>,
}

impl Timers {
    /// Sets a table's time, or takes it away.
    #[inline]
    pub(super) fn set(&mut self, table: usize, at: Option<Time>) {
        if self.of(table) == at {
            return;
        }
        if self.of_table.len() <= table {
            self.of_table.resize(table + 1, None);
        }
        let before = std::mem::replace(&mut self.of_table[table], at);
        before.map(|before| self.by_time.remove(&(before, table)));
        at.map(|at| self.by_time.insert((at, table)));
    }

    /// A table's time.
    #[inline]
    pub(super) fn of(&self, table: usize) -> Option<Time> {
        *self.of_table.get(table)?
    }

    /// The earliest time of all.
    pub(super) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// A table whose time has come; it then has none.
    pub(super) fn take_due(&mut self, now: Time) -> Option<usize> {
        let (_, table) = *self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.set(table, None);
        Some(table)
    }

    /// Compares the times of the tables with those in order.
    pub(super) fn check(&self) -> Result<(), String> {
        let of_table = self.of_table.iter().enumerate();
        let expected: BTreeSet<(Time, usize)> =
            of_table.filter_map(|(table, at)| at.map(|at| (at, table))).collect();
        if expected != self.by_time {
            return Err(format!("timers are {:?}, and tables have {expected:?}", self.by_time));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_due_by_time_each_once() {
        let mut timers = Timers::default();
        timers.set(3, Some(Time(20)));
        timers.set(1, Some(Time(10)));
        timers.set(0, Some(Time(5)));
        timers.set(1, Some(Time(30)));
        timers.set(0, None);
        timers.check().unwrap();
        assert_eq!((timers.next(), timers.of(1), timers.of(7)), (Some(Time(20)), Some(Time(30)), None));
        assert_eq!(timers.take_due(Time(19)), None);
        assert_eq!([timers.take_due(Time(30)), timers.take_due(Time(30))], [Some(3), Some(1)]);
        assert_eq!((timers.take_due(Time(99)), timers.next()), (None, None));
        timers.check().unwrap();
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut timers = Timers::default();
        timers.set(1, Some(Time(10)));
        timers.by_time.clear();
        assert!(timers.check().is_err(), "a time that never comes");
    }
}
