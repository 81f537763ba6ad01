//! The receiving end of a link: what arrives when.

use super::train::{self, FRAMES};
use super::{Probe, Reading};
use crate::types::{Clock, TableId, Time};
use crate::wire::frame::Piece;

/// The part of a train's rate that arrives, others' bytes included, if the train may be late because of these only.
const ENOUGH: f64 = 0.95;

/// What arrives on one connection.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    push: Option<Arriving>,
    train: Option<ArrivingTrain>,
}

/// A train that arrives.
#[derive(Debug)]
struct ArrivingTrain {
    number: u64,
    since: Time,
    /// How much later each of its frames is here than it was sent, by two clocks: only differences mean something.
    delays: Vec<i64>,
    /// Bytes after the first frame, those that others sent here included.
    bytes: u64,
}

/// A push that arrives. All of it was there to be sent when it began.
#[derive(Debug)]
struct Arriving {
    of: (TableId, Clock),
    since: Time,
    /// After the first frame.
    bytes: u64,
}

impl Gauge {
    /// A frame of a push has arrived.
    pub(crate) fn note_push(
        &mut self,
        now: Time,
        of: (TableId, Clock),
        piece: Piece,
        bytes: usize,
    ) -> Option<Reading> {
        if piece.sequence == 0 {
            self.push = Some(Arriving { of, since: now, bytes: 0 });
            return None;
        }
        let push = self.push.as_mut().filter(|push| push.of == of)?;
        push.bytes += bytes as u64;
        if !piece.is_last {
            return None;
        }
        let Arriving { since, bytes, .. } = self.push.take()?;
        Reading::transfer(bytes, now.since(since))
    }

    /// A frame of a train has arrived.
    pub(crate) fn note_probe(&mut self, now: Time, probe: &Probe) -> Option<Reading> {
        let delay = (now.0 / 1000).wrapping_sub(probe.sent) as i64;
        if probe.index == 0 {
            let delays = Vec::with_capacity(FRAMES);
            self.train = Some(ArrivingTrain { number: probe.train, since: now, delays, bytes: 0 });
        } else {
            self.note_other(probe.padding.len());
        }
        let train = self.train.as_mut()?;
        if train.number != probe.train || train.delays.len() != probe.index as usize {
            self.train = None;
            return None;
        }
        train.delays.push(delay);
        if train.delays.len() < FRAMES {
            return None;
        }
        let (train, rate) = (self.train.take()?, probe.rate as f64);
        let carried = train.bytes as f64 / now.since(train.since).as_secs_f64().max(1e-6);
        let is_delayed = train::is_rising(&train.delays, rate);
        Some(Reading::Probe {
            rate: probe.rate,
            is_delayed,
            is_disturbed: is_delayed && carried >= ENOUGH * rate,
        })
    }

    /// Bytes of somebody else have arrived.
    pub(crate) fn note_other(&mut self, bytes: usize) {
        if let Some(train) = &mut self.train {
            train.bytes += bytes as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(sequence: u32, is_last: bool) -> Piece {
        Piece { chunk: sequence, sequence, is_last }
    }

    fn at(millis: u64) -> Time {
        Time(millis * 1_000_000)
    }

    #[test]
    fn a_push_is_timed_from_its_first_frame_on() {
        let (mut gauge, of) = (Gauge::default(), (TableId(0), 3));
        assert_eq!(gauge.note_push(at(50), of, piece(0, false), 70_000), None);
        assert_eq!(gauge.note_push(at(60), of, piece(1, false), 50_000), None);
        let reading = gauge.note_push(at(70), of, piece(2, true), 50_000);
        assert_eq!(reading, Some(Reading::Transfer { bytes: 100_000, micros: 20_000 }));
        // One frame says nothing, nor do the last ones of a push whose first were sent before.
        assert_eq!(gauge.note_push(at(80), of, piece(0, true), 70_000), None);
        assert_eq!(gauge.note_push(at(90), (TableId(1), 3), piece(4, true), 70_000), None);
    }

    #[test]
    fn a_train_is_read_when_all_of_it_is_here() {
        let mut gauge = Gauge::default();
        let probe = |index: u32| Probe {
            train: 7,
            index,
            sent: u64::from(index) * 2000,
            rate: 1 << 20,
            padding: vec![0; 2000],
        };
        let mut arrive = |lateness: u64, others: usize| {
            (0..FRAMES as u32)
                .filter_map(|index| {
                    gauge.note_other(others);
                    gauge.note_probe(at(5 + u64::from(index) * lateness), &probe(index))
                })
                .collect::<Vec<Reading>>()
        };
        let reading = |is_delayed, is_disturbed| Reading::Probe { rate: 1 << 20, is_delayed, is_disturbed };
        assert_eq!(arrive(2, 0), [reading(false, false)]);
        assert_eq!(arrive(4, 0), [reading(true, false)]);
        assert_eq!(arrive(4, 2500), [reading(true, true)], "others had as much of the link");
        assert_eq!(arrive(8, 2500), [reading(true, false)], "both together do not get the rate");
        let mut gauge = Gauge::default();
        assert_eq!(gauge.note_probe(at(1), &probe(3)), None, "its beginning is not here");
        gauge.note_probe(at(1), &probe(0));
        assert_eq!(gauge.note_probe(at(1), &probe(2)), None);
        assert!(gauge.train.is_none());
    }
}
