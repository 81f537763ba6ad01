//! What a shard knows of links, where a codec's threshold follows them: those over which workers push to it, and those over which
//! its versions travel.

use super::delivery::Delivery;
use super::tables::Tables;
use crate::bandwidth::{Gauge, Probe, Reading, Watch};
use crate::status::LinksReport;
use crate::types::{ShardId, Time, WorkerId};
use crate::wire::Control;
use crate::wire::frame::Push;
use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Default)]
pub(super) struct Links {
    /// Whether some worker's threshold follows its links.
    times_pushes: bool,
    /// What arrives from each worker.
    gauges: BTreeMap<WorkerId, Gauge>,
    /// The links of this shard's versions, where its own threshold follows them.
    broadcast: Option<Watch<Way>>,
}

/// A link on which this shard's versions travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// To a worker.
    To(WorkerId),
    /// From that worker to others, as far as it says.
    Behind(WorkerId),
}

impl Way {
    fn worker(&self) -> WorkerId {
        let (Way::To(worker) | Way::Behind(worker)) = *self;
        worker
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::To(worker) => write!(f, "{worker}"),
            Way::Behind(worker) => write!(f, "somebody behind {worker}"),
        }
    }
}

impl Links {
    /// Codecs have changed.
    pub(super) fn follow(&mut self, id: ShardId, tables: &mut Tables) {
        self.times_pushes = tables.iter().any(|table| table.pushes_need().is_some());
        if !self.times_pushes {
            self.gauges.clear();
        }
        let need = tables.iter().filter_map(|table| table.versions_need()).max_by(f64::total_cmp);
        if self.broadcast.as_ref().map(Watch::need) != need {
            self.broadcast =
                need.map(|need| Watch::new(need, u64::from(id.server.0) << 32 | u64::from(id.core)));
        }
        self.tell(tables);
    }

    /// A frame of a push has arrived.
    #[inline]
    pub(super) fn note_push(
        &mut self,
        now: Time,
        worker: WorkerId,
        push: &Push,
        bytes: usize,
        delivery: &mut Delivery,
    ) {
        if !self.times_pushes {
            return;
        }
        self.gauges.values_mut().for_each(|gauge| gauge.note_other(bytes));
        let gauge = self.gauges.entry(worker).or_default();
        if let Some(reading) = gauge.note_push(now, (push.subject.table, push.clock), push.piece, bytes) {
            delivery.say(worker, &Control::Measured(reading));
        }
    }

    /// A frame of a train has arrived.
    pub(super) fn note_probe(&mut self, now: Time, worker: WorkerId, probe: &Probe, delivery: &mut Delivery) {
        let others = self.gauges.iter_mut().filter(|(other, _)| **other != worker);
        others.for_each(|(_, gauge)| gauge.note_other(probe.padding.len()));
        if let Some(reading) = self.gauges.entry(worker).or_default().note_probe(now, probe) {
            delivery.say(worker, &Control::Measured(reading));
        }
    }

    /// A worker follows this shard's streams.
    pub(super) fn add(&mut self, now: Time, worker: WorkerId) {
        if let Some(watch) = &mut self.broadcast {
            watch.add(now, Way::To(worker));
        }
    }

    /// Something was read of the link to a worker.
    pub(super) fn note(&mut self, now: Time, worker: WorkerId, reading: Reading, tables: &mut Tables) {
        if let Some(watch) = &mut self.broadcast {
            watch.note(now, Way::To(worker), reading);
            self.tell(tables);
        }
    }

    /// A worker says what is behind it.
    pub(super) fn note_behind(
        &mut self,
        now: Time,
        worker: WorkerId,
        lacking: Option<Reading>,
        tables: &mut Tables,
    ) {
        if let Some(watch) = &mut self.broadcast {
            watch.note_behind(now, Way::Behind(worker), lacking);
            self.tell(tables);
        }
    }

    /// A worker's connection is gone.
    pub(super) fn lose(&mut self, now: Time, worker: WorkerId, tables: &mut Tables) {
        self.gauges.remove(&worker);
        self.retain(now, |way| way.worker() != worker, tables);
    }

    /// A worker follows no stream of this shard any more: it gets them from somebody else.
    pub(super) fn leave(&mut self, now: Time, worker: WorkerId, tables: &mut Tables) {
        self.retain(now, |way| *way != Way::To(worker), tables);
    }

    fn retain(&mut self, now: Time, is_there: impl Fn(&Way) -> bool, tables: &mut Tables) {
        if let Some(watch) = &mut self.broadcast {
            watch.retain(now, is_there);
            self.tell(tables);
        }
    }

    /// Tables learn whether there is room.
    fn tell(&self, tables: &mut Tables) {
        let lacks_room = self.broadcast.as_ref().is_some_and(Watch::lacks_room);
        tables.iter_mut().for_each(|table| table.set_lacks_room(lacks_room));
    }

    /// The last change, once, as a line for the log.
    pub(super) fn take_news(&mut self) -> Option<String> {
        self.broadcast.as_mut()?.take_news().map(|change| change.to_string())
    }

    /// Sends probes that are due.
    pub(super) fn handle_timeout(&mut self, now: Time, delivery: &mut Delivery) {
        let Some(watch) = &mut self.broadcast else { return };
        let is_idle = delivery.is_settled();
        while let Some((way, probe)) = watch.poll(now, is_idle) {
            delivery.say(way.worker(), &Control::Probe(probe));
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.broadcast.as_ref()?.next_timeout()
    }

    pub(super) fn report(&self, now: Time) -> Option<LinksReport> {
        self.broadcast.as_ref().map(|watch| watch.report(now))
    }
}
