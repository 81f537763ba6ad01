//! The rounds of a table.

use super::round::{Round, RoundImage};
use crate::limits;
use crate::server::accumulators::Accumulators;
use crate::table::Layout;
use crate::types::Clock;
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};

/// The rounds of a table that are not closed, and the memory of one that was. There are few at a time.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// Ascending.
    open: Vec<(Clock, Round)>,
    spare: Option<Round>,
    /// Sums of earlier rounds may contain a departed worker's gradients.
    sums_are_exact_from: Clock,
}

/// What an image keeps of the rounds of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct RoundsImage {
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_ROUNDS_AHEAD as usize + 1 }>")]
    open: Vec<(Clock, RoundImage)>,
    sums_are_exact_from: Clock,
}

impl Rounds {
    pub(super) fn image(&self, layout: &Layout) -> RoundsImage {
        RoundsImage {
            open: self.open.iter().map(|(clock, round)| (*clock, round.image(layout))).collect(),
            sums_are_exact_from: self.sums_are_exact_from,
        }
    }

    /// The rounds that an image was made of when rounds below `version` were closed. The error says why there can be no such rounds.
    pub(super) fn from_image(
        layout: &Layout,
        image: RoundsImage,
        version: Clock,
        accumulators: &mut Accumulators,
    ) -> Result<Rounds, String> {
        let RoundsImage { open, sums_are_exact_from } = image;
        let may_be_open = version..=version + limits::MAX_ROUNDS_AHEAD;
        let mut rounds = Rounds { sums_are_exact_from, ..Rounds::default() };
        for (clock, round) in open {
            if !may_be_open.contains(&clock) {
                return Err(format!("round {clock} is open at version {version}"));
            }
            rounds.open.push((clock, Round::from_image(layout, round, accumulators)?));
        }
        rounds.check()?;
        Ok(rounds)
    }

    /// The round of a clock, with memory of an earlier one where there is some.
    pub(super) fn open(&mut self, clock: Clock, layout: &Layout) -> &mut Round {
        let at = self.open.partition_point(|(known, _)| *known < clock);
        if self.open.get(at).is_none_or(|(known, _)| *known != clock) {
            let round = self.spare.take().unwrap_or_else(|| Round::new(layout));
            self.open.insert(at, (clock, round));
        }
        &mut self.open[at].1
    }

    /// The same for a sum of gradients. A sum may hold a gradient of a worker that has left meanwhile, and was counted out.
    pub(super) fn open_for_sum(&mut self, clock: Clock, layout: &Layout) -> &mut Round {
        let is_exact = clock >= self.sums_are_exact_from;
        let round = self.open(clock, layout);
        if !is_exact {
            round.mark_inexact();
        }
        round
    }

    /// A worker has left: counts do not tell any more when a cell of an open round is complete, nor when one of a round up
    /// to `last` is that gets sums.
    pub(super) fn mark_inexact(&mut self, last: Clock) {
        self.open.iter_mut().for_each(|(_, round)| round.mark_inexact());
        self.sums_are_exact_from = last + 1;
    }

    /// The round of a clock, if it has begun.
    pub(super) fn get(&self, clock: Clock) -> Option<&Round> {
        self.open.iter().find(|(known, _)| *known == clock).map(|(_, round)| round)
    }

    /// Lets cells that were stepped take further gradients, after a switch of the model.
    pub(super) fn reopen(&mut self) {
        self.open.iter_mut().for_each(|(_, round)| round.reopen());
    }

    /// Takes a round out.
    pub(super) fn take(&mut self, clock: Clock) -> Option<Round> {
        let at = self.open.iter().position(|(known, _)| *known == clock)?;
        Some(self.open.remove(at).1)
    }

    /// Takes out the earliest round.
    pub(super) fn take_first(&mut self) -> Option<(Clock, Round)> {
        (!self.open.is_empty()).then(|| self.open.remove(0))
    }

    /// Keeps the memory of a round that is over for the next one.
    pub(super) fn keep(&mut self, mut round: Round, accumulators: &mut Accumulators) {
        round.clear(accumulators);
        self.spare.get_or_insert(round);
    }

    /// Drops the rounds before `version`.
    pub(super) fn drop_before(&mut self, version: Clock, accumulators: &mut Accumulators) {
        while self.open.first().is_some_and(|(clock, _)| *clock < version)
            && let Some((_, round)) = self.take_first()
        {
            self.keep(round, accumulators);
        }
    }

    /// How many have begun.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// How many accumulators they hold.
    pub(super) fn accumulators(&self) -> usize {
        self.all().map(Round::accumulators).sum()
    }

    /// Checks the invariants; the error names the one that does not hold.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.open.is_sorted_by(|a, b| a.0 < b.0) {
            return Err("rounds are out of order".into());
        }
        self.all().try_for_each(Round::check)
    }

    fn all(&self) -> impl Iterator<Item = &Round> {
        self.open.iter().map(|(_, round)| round).chain(&self.spare)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.all().map(Round::memory_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    fn layout() -> Layout {
        let chunk = Chunk { shard: ShardId { server: ServerId(0), core: 0 }, start: 0, len: 2 };
        Layout::new(TableSpec::dense("w", [2]), std::iter::once((0, chunk)))
    }

    fn clocks(rounds: &Rounds) -> Vec<Clock> {
        rounds.open.iter().map(|(clock, _)| *clock).collect()
    }

    #[test]
    fn rounds_are_open_in_order_until_they_are_taken_or_too_old() {
        let (layout, mut rounds, mut accumulators) = (layout(), Rounds::default(), Accumulators::default());
        for clock in [5, 3, 4, 5] {
            rounds.open(clock, &layout);
        }
        assert_eq!((clocks(&rounds), rounds.check()), (vec![3, 4, 5], Ok(())));
        assert!(rounds.get(4).is_some() && rounds.get(6).is_none());
        assert!(rounds.take(4).is_some() && rounds.take(4).is_none());
        rounds.drop_before(5, &mut accumulators);
        assert_eq!((clocks(&rounds), rounds.spare.is_some()), (vec![5], true));
        assert_eq!(
            (rounds.take_first().map(|(clock, _)| clock), rounds.take_first().is_none()),
            (Some(5), true)
        );
        rounds.open(9, &layout);
        assert!(rounds.spare.is_none(), "the memory of an earlier round is used again");
    }

    #[test]
    fn counts_of_rounds_that_a_departed_worker_may_be_in_do_not_tell_when_they_are_complete() {
        let (layout, mut rounds) = (layout(), Rounds::default());
        assert!(rounds.open_for_sum(2, &layout).is_completed_by(0, 1, 1));
        rounds.open(3, &layout);
        rounds.mark_inexact(4);
        for clock in [2, 3] {
            assert!(!rounds.open(clock, &layout).is_completed_by(0, 1, 1), "round {clock} was open");
        }
        assert!(!rounds.open_for_sum(4, &layout).is_completed_by(0, 1, 1), "a sum may have its gradient");
        assert!(rounds.open_for_sum(5, &layout).is_completed_by(0, 1, 1));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let (layout, mut rounds) = (layout(), Rounds::default());
        [3, 4].into_iter().for_each(|clock| _ = rounds.open(clock, &layout));
        rounds.open.swap(0, 1);
        assert!(rounds.check().is_err(), "out of order");
    }
}
