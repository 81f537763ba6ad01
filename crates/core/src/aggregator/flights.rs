//! Numbered frames of an aggregator to a shard that the shard has not noted.

use super::aggregate::{Aggregate, AggregateId};
use crate::types::{Time, WorkerId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Aggregates, and the numbered frames that bring them to the shard. A frame is sent again after a broken connection until
/// the shard has noted it.
#[derive(Debug, Default)]
pub(super) struct Flights {
    aggregates: BTreeMap<AggregateId, Aggregate>,
    last_id: u64,
    /// Frames that the shard has not noted, oldest first.
    frames: VecDeque<Flight>,
    last_number: u64,
    /// The sets of workers that some of these frames name, by their numbers.
    sets: VecDeque<(u64, Arc<[WorkerId]>)>,
    /// The last one of them.
    announced: Arc<[WorkerId]>,
    /// When aggregates end at the latest.
    deadlines: BTreeSet<(Time, AggregateId)>,
    deadline_of: BTreeMap<AggregateId, Time>,
}

/// A numbered frame of an aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flight {
    /// The shard takes each number once, in order.
    pub(super) number: u64,
    pub(super) aggregate: AggregateId,
    pub(super) cargo: Cargo,
}

/// Contents of a numbered frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cargo {
    /// Whose gradients are in the chunks that follow.
    Contributors,
    /// A chunk of the aggregate, by its place on the shard.
    Chunk(usize),
    /// The list of workers whose pushes are complete in it: the last frame of an aggregate.
    Completed,
}

impl Flights {
    pub(super) fn open(&mut self, aggregate: Aggregate) -> AggregateId {
        self.last_id += 1;
        let id = AggregateId(self.last_id);
        self.aggregates.insert(id, aggregate);
        id
    }

    pub(super) fn get(&self, id: AggregateId) -> Option<&Aggregate> {
        self.aggregates.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: AggregateId) -> Option<&mut Aggregate> {
        self.aggregates.get_mut(&id)
    }

    /// All aggregates, the oldest first.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (AggregateId, &Aggregate)> {
        self.aggregates.iter().map(|(&id, aggregate)| (id, aggregate))
    }

    /// The next numbered frame.
    pub(super) fn launch(&mut self, aggregate: AggregateId, cargo: Cargo) -> Flight {
        self.last_number += 1;
        let flight = Flight { number: self.last_number, aggregate, cargo };
        self.frames.push_back(flight);
        flight
    }

    /// A frame that says whose gradients are in the next chunks, unless that was said last.
    pub(super) fn announce(&mut self, aggregate: AggregateId, workers: Vec<WorkerId>) -> Option<Flight> {
        if *self.announced == *workers {
            return None;
        }
        let flight = self.launch(aggregate, Cargo::Contributors);
        self.announced = workers.into();
        self.sets.push_back((flight.number, self.announced.clone()));
        Some(flight)
    }

    /// The workers that a frame names.
    pub(super) fn contributors(&self, number: u64) -> &[WorkerId] {
        let at = self.sets.binary_search_by_key(&number, |(number, _)| *number);
        at.map_or(&[], |at| &self.sets[at].1)
    }

    /// Gives up everything. Frames are numbered from the beginning; numbers of aggregates are not used again.
    pub(super) fn begin_anew(&mut self) -> impl Iterator<Item = Aggregate> + use<> {
        let fresh = Flights { last_id: self.last_id, ..Flights::default() };
        std::mem::replace(self, fresh).aggregates.into_values()
    }

    /// Frames that the shard has not noted, oldest first.
    pub(super) fn frames(&self) -> impl Iterator<Item = Flight> + '_ {
        self.frames.iter().copied()
    }

    /// The shard has noted all frames up to this number. The next aggregate of which this was the last frame; call until
    /// `None`.
    pub(super) fn take_noted(&mut self, number: u64) -> Option<Aggregate> {
        while self.frames.front().is_some_and(|flight| flight.number <= number) {
            let flight = self.frames.pop_front()?;
            if flight.cargo == Cargo::Contributors {
                self.sets.pop_front();
            }
            if flight.cargo == Cargo::Completed
                && let Some(aggregate) = self.aggregates.remove(&flight.aggregate)
            {
                return Some(aggregate);
            }
        }
        None
    }

    pub(super) fn has_deadline(&self, id: AggregateId) -> bool {
        self.deadline_of.contains_key(&id)
    }

    pub(super) fn set_deadline(&mut self, id: AggregateId, at: Time) {
        self.clear_deadline(id);
        self.deadline_of.insert(id, at);
        self.deadlines.insert((at, id));
    }

    pub(super) fn clear_deadline(&mut self, id: AggregateId) {
        if let Some(at) = self.deadline_of.remove(&id) {
            self.deadlines.remove(&(at, id));
        }
    }

    /// The first aggregate whose deadline is over. It has none afterwards.
    pub(super) fn take_due(&mut self, now: Time) -> Option<AggregateId> {
        let &(_, id) = self.deadlines.first().filter(|(at, _)| *at <= now)?;
        self.clear_deadline(id);
        Some(id)
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.aggregates.values().map(Aggregate::memory_bytes).sum()
    }

    /// Whether frames, deadlines and aggregates fit together.
    pub(super) fn check(&self) -> Result<(), String> {
        let numbers = self.frames.iter().rev().map(|flight| flight.number);
        if !numbers.eq((1..=self.last_number).rev().take(self.frames.len())) {
            return Err("frames to a shard are not numbered one after the other".into());
        }
        if let Some(flight) = self.frames.iter().find(|flight| self.get(flight.aggregate).is_none()) {
            return Err(format!("{flight:?} is of an aggregate that is not there"));
        }
        let naming = self.frames.iter().filter(|flight| flight.cargo == Cargo::Contributors);
        if !naming.map(|flight| flight.number).eq(self.sets.iter().map(|(number, _)| *number)) {
            return Err("frames that name workers and the sets of these do not fit".into());
        }
        let of = self.deadline_of.iter().map(|(&id, &at)| (at, id)).collect::<BTreeSet<_>>();
        if of != self.deadlines {
            return Err("deadlines are not those of the aggregates".into());
        }
        match self.deadline_of.keys().find(|id| self.get(**id).is_none()) {
            Some(id) => Err(format!("{id:?} has a deadline and is not there")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregator::aggregate::Subject;
    use crate::aggregator::sum_buffer::SumBuffer;
    use crate::table::{Chunk, Layout, TableSpec};
    use crate::types::{ServerId, ShardId};

    fn aggregate(clock: u64) -> Aggregate {
        let chunk = Chunk { shard: ShardId { server: ServerId(0), core: 0 }, start: 0, len: 2 };
        let layout = Layout::new(TableSpec::dense("w", [2]), [(0, chunk)].into_iter());
        let buffer = SumBuffer::try_new(&layout).unwrap();
        Aggregate::new(Subject { table: 0, clock, attempt: 0, epoch: 1 }, buffer, 1)
    }

    #[test]
    fn frames_stay_until_they_are_noted_and_an_aggregate_until_its_last_one_is() {
        let mut flights = Flights::default();
        let ids = [0, 1].map(|clock| flights.open(aggregate(clock)));
        let cargo = [(ids[0], Cargo::Chunk(0)), (ids[1], Cargo::Chunk(0)), (ids[0], Cargo::Completed)];
        let numbers = cargo.map(|(id, cargo)| flights.launch(id, cargo).number);
        assert_eq!((numbers, flights.check()), ([1, 2, 3], Ok(())));
        assert!(flights.take_noted(0).is_none());
        assert!(flights.take_noted(2).is_none(), "chunks alone end nothing");
        assert_eq!(flights.frames().map(|flight| flight.number).collect::<Vec<_>>(), [3]);
        assert_eq!(flights.take_noted(3).map(|aggregate| aggregate.subject().clock), Some(0));
        assert!(flights.take_noted(3).is_none() && flights.get(ids[0]).is_none());
        assert!(flights.get(ids[1]).is_some());
        assert_eq!((flights.launch(ids[1], Cargo::Completed).number, flights.check()), (4, Ok(())));
    }

    #[test]
    fn workers_are_named_when_they_are_others_than_before() {
        let mut flights = Flights::default();
        let id = flights.open(aggregate(0));
        let [one, both] = [vec![WorkerId(1)], vec![WorkerId(1), WorkerId(2)]];
        let numbers = [&one, &one, &both, &one].map(|workers| {
            let named = flights.announce(id, workers.clone()).map(|flight| flight.number);
            flights.launch(id, Cargo::Chunk(0));
            named
        });
        assert_eq!((numbers, flights.check()), ([Some(1), None, Some(4), Some(6)], Ok(())));
        assert_eq!((flights.contributors(4), flights.contributors(1)), (both.as_slice(), one.as_slice()));
        assert!(flights.take_noted(5).is_none());
        assert_eq!((flights.contributors(6), flights.check()), (one.as_slice(), Ok(())));
        // What was said last holds until something else is said, but for one who knows nothing of it.
        assert!(flights.announce(id, one.clone()).is_none());
        assert_eq!((flights.begin_anew().count(), flights.check()), (1, Ok(())));
        let next = flights.open(aggregate(0));
        assert!(next > id && flights.announce(next, one).is_some_and(|flight| flight.number == 1));
    }

    #[test]
    fn each_aggregate_has_one_deadline() {
        let mut flights = Flights::default();
        let ids = [0, 1].map(|clock| flights.open(aggregate(clock)));
        flights.set_deadline(ids[0], Time(20));
        flights.set_deadline(ids[1], Time(30));
        flights.set_deadline(ids[0], Time(40));
        assert_eq!((flights.next_timeout(), flights.check()), (Some(Time(30)), Ok(())));
        assert_eq!(flights.take_due(Time(29)), None);
        assert_eq!([flights.take_due(Time(30)), flights.take_due(Time(39))], [Some(ids[1]), None]);
        assert!(!flights.has_deadline(ids[1]) && flights.has_deadline(ids[0]));
        flights.clear_deadline(ids[0]);
        assert_eq!((flights.next_timeout(), flights.take_due(Time(100))), (None, None));
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut flights = Flights::default();
        let id = flights.open(aggregate(0));
        flights.launch(id, Cargo::Chunk(0));
        flights.aggregates.remove(&id);
        assert!(flights.check().is_err(), "a frame of nothing");
        let mut flights = Flights::default();
        let id = flights.open(aggregate(0));
        flights.set_deadline(id, Time(1));
        flights.deadlines.clear();
        assert!(flights.check().is_err(), "a deadline that never comes");
        let mut flights = Flights::default();
        let id = flights.open(aggregate(0));
        (0..2).for_each(|_| _ = flights.launch(id, Cargo::Chunk(0)));
        flights.frames.pop_back();
        assert!(flights.check().is_err(), "a number is missing");
    }
}
