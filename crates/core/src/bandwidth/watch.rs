//! The sending end: what is known of its links, and what follows from it.

use super::{Mbit, Probe, Reading, Train};
use crate::limits;
use crate::prng::Prng;
use crate::status::{LinksReport, RoomChange};
use crate::types::Time;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::time::Duration;

/// A link of which nothing was heard for so long is probed.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// The same for one that carried too little.
const PROBE_SLOW_AFTER: Duration = Duration::from_millis(250);
/// A link that a transfer or a train leaves in doubt is probed within so long; by chance, so that senders do not meet again and again.
const DOUBT: Duration = Duration::from_millis(200);
/// The same where trains have met.
const DISTURBED: Duration = Duration::from_millis(600);
/// After so many trains that met others' frames, these are taken for what there always is.
const DISTURBED_TRAINS: u32 = 5;
/// A node that is never idle probes after so long all the same. A train that is not answered for so long is lost.
const PATIENCE: Duration = Duration::from_secs(5);
/// A node that is busy looks again within so long whether it is idle; by chance too: others become idle when it does.
const TICK: Duration = Duration::from_millis(200);
/// A link that had too little must carry so much more than is needed, so that it does not change to and fro.
const MARGIN: f64 = 1.1;
/// A transfer must take so many seconds at the rate that is needed, for a slow one to mean something.
const LEAST_SECONDS: f64 = 0.02;
/// Transfers are worse than they were when the link carried enough if their rate is less by so much.
const NEWS: f64 = 0.25;
/// A better transfer raises the rate that later ones are compared with by so much of the difference.
const RISE: f64 = 0.25;
/// So many of them in a row tell as much as a train does, which a busy node may not find the time for.
const SLOW_TRANSFERS: u32 = 2;
/// Trains in a row that must be delayed: a connection that was idle begins slowly.
const DELAYED_TRAINS: u32 = 2;

/// What is known of the links over which somebody sends.
///
/// A transfer shows what a link carries at least. One that is slow may have shared the link, at either end, with others of the same
/// job: it only leaves the link in doubt, and a train that is sent when this node is idle tells. Transfers that are worse than when the link
/// carried enough tell too, if there are some in a row.
#[derive(Debug)]
pub(crate) struct Watch<K> {
    /// In bytes per second.
    need: f64,
    links: BTreeMap<K, Link>,
    /// Links with too little, and what was read there.
    lacking: BTreeMap<K, Reading>,
    /// The train that leaves, or that an answer is awaited to, and until when.
    train: Option<(K, Train, Time)>,
    trains: u64,
    prng: Prng,
    /// When to look again.
    tick: Option<Time>,
    changes: VecDeque<(Time, RoomChange)>,
    count: u32,
    /// The last change was not told yet.
    is_news: bool,
}

#[derive(Debug)]
struct Link {
    /// When it is probed, if nothing is heard of it.
    probe_at: Time,
    delayed_trains: u32,
    disturbed_trains: u32,
    slow_transfers: u32,
    /// The rate of the last transfer, and what it was when the link carried enough.
    rate: Option<f64>,
    rate_then: Option<f64>,
}

impl<K: Ord + Copy + Display> Watch<K> {
    /// Of links that must carry so many bytes per second; what is left to chance follows from the seed.
    pub(crate) fn new(need: f64, seed: u64) -> Watch<K> {
        Watch {
            prng: Prng::new(seed),
            need,
            links: BTreeMap::new(),
            lacking: BTreeMap::new(),
            train: None,
            trains: 0,
            tick: None,
            changes: VecDeque::new(),
            count: 0,
            is_news: false,
        }
    }

    pub(crate) fn need(&self) -> f64 {
        self.need
    }

    /// There is a link, and it is probed if nothing is heard of it.
    pub(crate) fn add(&mut self, now: Time, link: K) {
        let probe_at = now + PROBE_AFTER;
        let known = Link {
            probe_at,
            delayed_trains: 0,
            disturbed_trains: 0,
            slow_transfers: 0,
            rate: None,
            rate_then: None,
        };
        self.links.entry(link).or_insert(known);
    }

    /// Links that are not among these are gone.
    pub(crate) fn retain(&mut self, now: Time, is_there: impl Fn(&K) -> bool) {
        self.links.retain(|link, _| is_there(link));
        if self.train.as_ref().is_some_and(|(link, ..)| !is_there(link)) {
            self.train = None;
        }
        let gone: Vec<K> = self.lacking.keys().copied().filter(|link| !is_there(link)).collect();
        for link in gone {
            self.change(now, link, None, || format!("the link to {link} is gone"));
        }
    }

    /// Something was read of a link.
    pub(crate) fn note(&mut self, now: Time, link: K, reading: Reading) {
        let lacked = self.lacking.contains_key(&link);
        let Some(known) = self.links.get_mut(&link) else { return };
        match reading {
            Reading::Transfer { bytes, .. } => {
                let rate = reading.rate();
                known.rate = Some(rate);
                let is_long = bytes as f64 >= self.need * LEAST_SECONDS;
                // Against the time when it carried enough, or a train went through.
                let (is_as_good, is_worse) = match known.rate_then {
                    Some(then) => (rate >= then * (1.0 - NEWS / 2.0), rate < then * (1.0 - NEWS)),
                    None => (false, false),
                };
                if rate >= self.need * if lacked { MARGIN } else { 1.0 } || lacked && is_long && is_as_good {
                    (known.probe_at, known.delayed_trains, known.slow_transfers) = (now + PROBE_AFTER, 0, 0);
                    // One transfer that buffers took in at once must not make all others look slow.
                    let smoothed = |then: f64| if rate < then { rate } else { then + (rate - then) * RISE };
                    known.rate_then = Some(known.rate_then.map_or(rate, smoothed));
                    self.set(now, link, None);
                } else if is_long {
                    known.slow_transfers = if is_worse { known.slow_transfers + 1 } else { 0 };
                    if known.slow_transfers >= SLOW_TRANSFERS {
                        self.set(now, link, Some(reading));
                    } else if is_worse || known.rate_then.is_none() {
                        known.probe_at = known.probe_at.min(now + DOUBT.mul_f64(self.prng.uniform()));
                    }
                }
            }
            Reading::Probe { is_delayed, is_disturbed, .. } => {
                if self.train.as_ref().is_some_and(|(probed, ..)| *probed == link) {
                    self.train = None;
                }
                known.disturbed_trains = if is_disturbed { known.disturbed_trains + 1 } else { 0 };
                if !is_delayed {
                    known.probe_at = now + PROBE_AFTER;
                    (known.rate_then, known.slow_transfers, known.delayed_trains) = (known.rate, 0, 0);
                    self.set(now, link, None);
                    return;
                }
                let chance = self.prng.uniform();
                if is_disturbed && known.disturbed_trains < DISTURBED_TRAINS {
                    known.probe_at = now + DISTURBED.mul_f64(chance);
                    return;
                }
                known.delayed_trains += 1;
                if lacked || known.delayed_trains >= DELAYED_TRAINS {
                    known.probe_at = now + PROBE_SLOW_AFTER + DOUBT.mul_f64(chance);
                    self.set(now, link, Some(reading));
                } else {
                    known.probe_at = now + DOUBT.mul_f64(chance);
                }
            }
        }
    }

    /// What somebody behind a link says of its own: the reading of one that carries too little.
    pub(crate) fn note_behind(&mut self, now: Time, link: K, lacking: Option<Reading>) {
        self.set(now, link, lacking);
    }

    fn set(&mut self, now: Time, link: K, lacking: Option<Reading>) {
        let need = Mbit(self.need);
        let cause = match lacking {
            Some(reading) => format!("{link} gets {reading}, and {need} are needed"),
            None => format!("{link} gets the {need} that are needed"),
        };
        self.change(now, link, lacking, || cause);
    }

    fn change(&mut self, now: Time, link: K, lacking: Option<Reading>, cause: impl FnOnce() -> String) {
        let lacked = self.lacks_room();
        match lacking {
            Some(reading) => drop(self.lacking.insert(link, reading)),
            None => drop(self.lacking.remove(&link)),
        }
        if self.lacks_room() != lacked {
            self.count += 1;
            self.is_news = true;
            if self.changes.len() == limits::MAX_ROOM_CHANGES {
                self.changes.pop_front();
            }
            let change = RoomChange { lacks_room: !lacked, seconds_ago: 0.0, cause: cause() };
            self.changes.push_back((now, change));
        }
    }

    /// Whether one of the links carries less than is needed.
    pub(crate) fn lacks_room(&self) -> bool {
        !self.lacking.is_empty()
    }

    /// The slowest of the links that carry less than is needed.
    pub(crate) fn slowest(&self) -> Option<Reading> {
        self.lacking.values().copied().min_by(|one, other| one.rate().total_cmp(&other.rate()))
    }

    /// The last change, once: which threshold holds from now on, and why.
    pub(crate) fn take_news(&mut self) -> Option<&RoomChange> {
        std::mem::take(&mut self.is_news).then(|| self.changes.back().map(|(_, change)| change)).flatten()
    }

    /// A probe that is to be sent now.
    pub(crate) fn poll(&mut self, now: Time, is_idle: bool) -> Option<(K, Probe)> {
        self.tick = self.tick.filter(|tick| *tick > now);
        if let Some((key, ..)) = self.train.take_if(|(_, _, lost_at)| *lost_at <= now) {
            // Others come before one that does not answer.
            self.links.entry(key).and_modify(|link| link.probe_at = now + PROBE_AFTER);
        }
        if self.train.is_none() {
            let due = || self.links.iter().filter(|(_, link)| link.probe_at <= now);
            // Where too little was carried, a train that goes through tells whatever it met, and others do no harm: it does not
            // wait for an idle moment, nor behind those that do.
            let may_leave = |key: &K, link: &Link| {
                is_idle || self.lacking.contains_key(key) || link.probe_at + PATIENCE <= now
            };
            let next = due().filter(|(key, link)| may_leave(key, link)).min_by_key(|(_, link)| link.probe_at);
            let Some((key, _)) = next else {
                if due().next().is_some() {
                    self.tick = Some(now + TICK.mul_f64(self.prng.uniform()));
                }
                return None;
            };
            self.trains += 1;
            self.train = Some((*key, Train::new(now, self.trains, self.need), now + PATIENCE));
        }
        let (key, train, _) = self.train.as_mut()?;
        train.poll(now).map(|probe| (*key, probe))
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let probe = match &self.train {
            Some((_, train, lost_at)) => Some(train.due().unwrap_or(*lost_at)),
            None => self.links.values().map(|link| link.probe_at).min(),
        };
        // While it is busy it looks again later.
        match self.tick {
            Some(tick) if self.train.is_none() => Some(tick),
            tick => probe.into_iter().chain(tick).min(),
        }
    }

    pub(crate) fn report(&self, now: Time) -> LinksReport {
        let told = |(at, change): &(Time, RoomChange)| RoomChange {
            seconds_ago: now.since(*at).as_secs_f64(),
            ..change.clone()
        };
        LinksReport {
            lacks_room: self.lacks_room(),
            changes: self.count,
            last: self.changes.iter().map(told).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::train::FRAMES;
    use super::*;
    use crate::types::WorkerId;

    const NEED: f64 = 6_250_000.0;

    fn at(millis: u64) -> Time {
        Time(millis * 1_000_000)
    }

    /// A transfer of a tenth of a second.
    fn transfer(mbit: u64) -> Reading {
        Reading::Transfer { bytes: mbit * 12_500, micros: 100_000 }
    }

    fn probe(is_delayed: bool) -> Reading {
        Reading::Probe { rate: NEED as u64, is_delayed, is_disturbed: false }
    }

    fn watch() -> Watch<WorkerId> {
        let mut watch = Watch::new(NEED, 1);
        (0..2).for_each(|worker| watch.add(Time::ZERO, WorkerId(worker)));
        watch
    }

    #[test]
    fn one_link_with_too_little_is_too_little() {
        let mut watch = watch();
        watch.note(at(100), WorkerId(0), transfer(60));
        assert!(!watch.lacks_room() && watch.take_news().is_none());
        (0..DELAYED_TRAINS).for_each(|_| watch.note(at(200), WorkerId(1), probe(true)));
        let cause = watch.take_news().map(|change| change.cause.clone());
        assert_eq!(cause.as_deref(), Some("worker 1 gets less than 50 Mbit/s, and 50 Mbit/s are needed"));
        assert!(watch.slowest() == Some(probe(true)) && watch.take_news().is_none());
        watch.note(at(400), WorkerId(0), transfer(90));
        watch.note(at(500), WorkerId(1), transfer(52));
        assert!(watch.lacks_room(), "52 of 50 are not enough for a link that had less");
        watch.note(at(600), WorkerId(1), probe(false));
        let report = watch.report(at(1600));
        assert_eq!((report.lacks_room, report.changes, report.last.len()), (false, 2, 2));
        assert_eq!(report.last[1].seconds_ago, 1.0);
        assert_eq!(report.last[1].cause, "worker 1 gets the 50 Mbit/s that are needed");
    }

    #[test]
    fn a_slow_transfer_leaves_a_link_in_doubt_once() {
        let mut watch = watch();
        let is_probed_soon =
            |watch: &Watch<WorkerId>, now| watch.next_timeout().is_some_and(|next| next <= at(now) + DOUBT);
        watch.note(at(100), WorkerId(0), Reading::Transfer { bytes: 40_000, micros: 100_000 });
        assert!(!is_probed_soon(&watch, 100), "it is short, and may have waited for other things");
        watch.note(at(200), WorkerId(0), transfer(40));
        assert!(!watch.lacks_room() && is_probed_soon(&watch, 200));
        watch.note(at(300), WorkerId(0), probe(false));
        watch.note(at(350), WorkerId(0), transfer(42));
        assert!(!is_probed_soon(&watch, 350), "it is as it was");
        watch.note(at(400), WorkerId(0), transfer(20));
        assert!(is_probed_soon(&watch, 400) && !watch.lacks_room());
        (1..SLOW_TRANSFERS).for_each(|_| watch.note(at(410), WorkerId(0), transfer(20)));
        assert!(watch.lacks_room(), "there was no time for a train");
        watch.note(at(420), WorkerId(0), transfer(39));
        assert!(!watch.lacks_room(), "it is as it was when a train went through");
        // Trains that met others' frames say nothing, unless all of them do.
        let met = Reading::Probe { rate: NEED as u64, is_delayed: true, is_disturbed: true };
        (1..DISTURBED_TRAINS).for_each(|_| watch.note(at(500), WorkerId(0), met));
        assert!(!watch.lacks_room());
        (0..DELAYED_TRAINS).for_each(|_| watch.note(at(600), WorkerId(0), met));
        assert!(watch.lacks_room());
    }

    #[test]
    fn transfers_are_compared_with_what_the_link_carried_beyond_the_need() {
        // Shapers pass some of a transfer at once, so that a link of twice the need reads as more, and half of that is not far below.
        let mut watch = watch();
        (0..3).for_each(|_| watch.note(at(100), WorkerId(0), transfer(126)));
        (0..SLOW_TRANSFERS).for_each(|_| watch.note(at(200), WorkerId(0), transfer(45)));
        assert!(watch.lacks_room(), "45 is nearly enough, and far from what it was");
        watch.note(at(300), WorkerId(0), transfer(60));
        assert!(!watch.lacks_room());
        // One transfer of a full buffer does not change what is usual.
        let mut watch = self::watch();
        (0..3).for_each(|_| watch.note(at(100), WorkerId(0), transfer(52)));
        watch.note(at(200), WorkerId(0), transfer(70));
        (0..SLOW_TRANSFERS).for_each(|_| watch.note(at(300), WorkerId(0), transfer(45)));
        assert!(!watch.lacks_room());
    }

    #[test]
    fn a_link_that_is_silent_is_probed_and_one_delayed_train_is_none() {
        let mut watch = watch();
        watch.note(at(900), WorkerId(0), transfer(60));
        assert_eq!(watch.poll(at(5), true), None);
        let mut probed = |from: u64, is_idle: bool| {
            let (mut frames, until) = (0, at(from + 160));
            while let Some(now) = watch.next_timeout().filter(|next| *next < until) {
                while let Some((link, _)) = watch.poll(now, is_idle) {
                    assert_eq!(link, WorkerId(1));
                    frames += 1;
                }
            }
            if frames > 0 {
                watch.note(until, WorkerId(1), probe(true));
            }
            (frames, watch.lacks_room())
        };
        assert_eq!(probed(1000, false), (0, false));
        assert_eq!(probed(1200, true), (FRAMES, false));
        assert_eq!(probed(1600, true), (FRAMES, true));
        watch.retain(at(1900), |link| *link == WorkerId(0));
        assert!(!watch.lacks_room());
        assert_eq!(watch.take_news().unwrap().cause, "the link to worker 1 is gone");
    }

    #[test]
    fn a_link_that_had_too_little_waits_for_no_idle_moment() {
        let mut watch = watch();
        (0..DELAYED_TRAINS).for_each(|_| watch.note(at(2000), WorkerId(1), probe(true)));
        // The other one has been due for longer, and this node is never idle.
        let probed = watch.poll(at(3000), false).map(|(link, _)| link);
        assert_eq!(probed, Some(WorkerId(1)));
    }

    #[test]
    fn a_train_that_is_not_answered_is_sent_again() {
        let mut watch = watch();
        let mut now = Time::ZERO;
        let mut probed = Vec::new();
        while now < at(14_000) {
            probed.extend(std::iter::from_fn(|| watch.poll(now, true)).map(|(link, _)| link));
            now = watch.next_timeout().expect("it goes on").max(Time(now.0 + 1));
        }
        // The other link does not wait until this one answers.
        probed.dedup();
        assert_eq!(probed, [0, 1, 0].map(WorkerId));
    }
}
