//! Who was waited for: the causes of waiting time, and tallies of it.
//!
//! A worker counts the time in which its application waits, once whatever it waits for, and charges every stretch of it to
//! causes. A tally never charges more than was waited.

use crate::limits;
use crate::types::{ServerId, WorkerId};
use crate::wire::bounded::sequence;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Bits of a delay's microseconds: almost nine years.
const MICROS_BITS: u32 = 48;

/// How long an answer or a version was held back, and the worker that was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delay {
    /// The worker whose push, or departure, was the last that was missing.
    pub by: WorkerId,
    /// How long.
    pub time: Duration,
}

impl Delay {
    /// As a header field: the rank + 1 in the upper 16 bits, microseconds in the lower 48; 0 for no delay.
    pub fn to_bits(delay: Option<Delay>) -> u64 {
        let Some(Delay { by, time }) = delay.filter(|delay| !delay.by.is_reader()) else { return 0 };
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).min((1 << MICROS_BITS) - 1);
        u64::from(by.0 + 1) << MICROS_BITS | micros
    }

    /// Two delays one after the other. The later one names the worker: the earlier one alone would not have mattered.
    pub(crate) fn after(first: Option<Delay>, then: Option<Delay>) -> Option<Delay> {
        match (first, then) {
            (Some(first), Some(then)) => {
                Some(Delay { by: then.by, time: first.time.saturating_add(then.time) })
            }
            (first, then) => then.or(first),
        }
    }

    /// The delay that a peer tells of; none for a rank that no worker can have.
    pub fn from_bits(bits: u64) -> Option<Delay> {
        let by = WorkerId(u32::try_from(bits >> MICROS_BITS).ok()?.checked_sub(1)?);
        let time = Duration::from_micros(bits & ((1 << MICROS_BITS) - 1));
        (!by.is_reader()).then_some(Delay { by, time })
    }
}

/// A cause of waiting time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WaitCause {
    /// A worker whose push was the last that a pull's condition lacked.
    Push(WorkerId),
    /// A worker that came last to a barrier.
    Barrier(WorkerId),
    /// A worker that was the last to be ready when the job started.
    Start(WorkerId),
    /// A server whose answer came after those of all others.
    Server(ServerId),
    /// Sending, stepping and receiving, on all servers alike.
    Servers,
    /// The coordinator's answers.
    Coordinator,
}

impl WaitCause {
    /// The single worker or server that others waited for; `None` for all servers together and for the coordinator.
    pub fn node(self) -> Option<WaitedNode> {
        match self {
            WaitCause::Push(worker) | WaitCause::Barrier(worker) | WaitCause::Start(worker) => {
                Some(WaitedNode::Worker(worker))
            }
            WaitCause::Server(server) => Some(WaitedNode::Server(server)),
            WaitCause::Servers | WaitCause::Coordinator => None,
        }
    }

    /// The reason as half a sentence.
    pub fn reason(self) -> &'static str {
        match self {
            WaitCause::Push(_) => "its pushes came last",
            WaitCause::Barrier(_) => "it came last to barriers",
            WaitCause::Start(_) => "it was the last to be ready at the start",
            WaitCause::Server(_) => "its answers came last",
            WaitCause::Servers => "sending, stepping and receiving take that long on all of them",
            WaitCause::Coordinator => "it answers barriers, the start and questions",
        }
    }
}

impl fmt::Display for WaitCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.node()) {
            (_, Some(node)) => node.fmt(f),
            (WaitCause::Coordinator, None) => f.write_str("the coordinator"),
            (_, None) => f.write_str("all servers"),
        }
    }
}

/// A node that others waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitedNode {
    /// A worker.
    Worker(WorkerId),
    /// A server.
    Server(ServerId),
}

impl fmt::Display for WaitedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitedNode::Worker(worker) => worker.fmt(f),
            WaitedNode::Server(server) => server.fmt(f),
        }
    }
}

/// Waiting time by cause, as it is reported: of one worker, or of many added up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Waited {
    /// Seconds in which applications waited, however much they waited for at a time.
    pub seconds: f64,
    /// Seconds charged to causes, the largest first.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_WAIT_CAUSES }>")]
    pub causes: Vec<Charge>,
    /// Seconds charged to causes that are too small to be listed.
    pub others: f64,
}

/// Waiting time that is charged to a cause.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Charge {
    /// The cause.
    pub cause: WaitCause,
    /// How much.
    pub seconds: f64,
}

impl Waited {
    /// Adds tallies up. The largest causes stay listed.
    pub fn sum<'a>(tallies: impl IntoIterator<Item = &'a Waited>) -> Waited {
        let (mut all, mut by_cause) = (Waited::default(), BTreeMap::<WaitCause, f64>::new());
        for waited in tallies {
            all.seconds += sound(waited.seconds);
            all.others += sound(waited.others);
            for charge in &waited.causes {
                *by_cause.entry(charge.cause).or_default() += sound(charge.seconds);
            }
        }
        all.list(
            by_cause.into_iter().map(|(cause, seconds)| Charge { cause, seconds }),
            limits::MAX_WAIT_CAUSES,
        );
        all
    }

    /// The same without what no worker can have waited: numbers that are none, or a cause that is listed twice.
    pub(crate) fn sound(&self) -> Waited {
        Waited::sum([self])
    }

    /// Lists the largest of these charges, and adds up the rest.
    fn list(&mut self, charges: impl Iterator<Item = Charge>, most: usize) {
        self.causes = charges.collect();
        self.causes
            .sort_by(|one, next| next.seconds.total_cmp(&one.seconds).then(one.cause.cmp(&next.cause)));
        let rest = self.causes.split_off(self.causes.len().min(most));
        self.others += rest.iter().map(|charge| charge.seconds).sum::<f64>();
    }

    /// Seconds that are charged, to listed causes and to others.
    pub fn charged(&self) -> f64 {
        self.causes.iter().map(|charge| charge.seconds).sum::<f64>() + self.others
    }

    /// Seconds that a cause is charged with.
    pub fn of(&self, cause: WaitCause) -> f64 {
        self.causes.iter().find(|charge| charge.cause == cause).map_or(0.0, |charge| charge.seconds)
    }

    /// The largest causes as lines for people: who was waited for, how long, why.
    pub fn lines(&self, most: usize) -> impl Iterator<Item = String> {
        self.texts(most).map(|(cause, text)| format!("waited for {cause}: {text}"))
    }

    /// The same without the first words.
    pub fn texts(&self, most: usize) -> impl Iterator<Item = (WaitCause, String)> {
        let worth_telling = self.causes.iter().filter(|charge| charge.seconds >= 0.05);
        worth_telling.take(most).map(|&Charge { cause, seconds }| {
            let (share, why) = (100.0 * seconds / self.seconds.max(f64::MIN_POSITIVE), cause.reason());
            (cause, format!("{seconds:.1} s of workers' time ({share:.0}% of all waiting), because {why}"))
        })
    }
}

/// A peer's number of seconds, as one that can be added up.
pub(crate) fn sound(seconds: f64) -> f64 {
    const MOST: f64 = 1e12;
    if seconds.is_finite() { seconds.clamp(0.0, MOST) } else { 0.0 }
}

/// The waiting time of one worker, and what it is charged to.
#[derive(Debug, Default)]
pub(crate) struct WaitTally {
    waited: Duration,
    uncharged: Duration,
    causes: BTreeMap<WaitCause, Duration>,
    /// Charged to causes that were removed because there were too many.
    others: Duration,
}

impl WaitTally {
    /// The application has waited this long.
    pub(crate) fn add(&mut self, time: Duration) {
        self.waited += time;
        self.uncharged += time;
    }

    /// Waiting time that is not charged yet.
    pub(crate) fn uncharged(&self) -> Duration {
        self.uncharged
    }

    /// Charges this time to a cause, but no more than was waited and is not charged yet.
    pub(crate) fn charge(&mut self, cause: WaitCause, time: Duration) {
        let time = time.min(self.uncharged);
        if time.is_zero() {
            return;
        }
        self.uncharged -= time;
        *self.causes.entry(cause).or_default() += time;
        if self.causes.len() > limits::MAX_WAIT_CAUSES_KEPT {
            let smallest = self.causes.iter().min_by_key(|(_, time)| **time).map(|(cause, _)| *cause);
            self.others += smallest.and_then(|cause| self.causes.remove(&cause)).unwrap_or_default();
        }
    }

    pub(crate) fn report(&self) -> Waited {
        let mut waited = Waited {
            seconds: self.waited.as_secs_f64(),
            causes: Vec::new(),
            others: self.others.as_secs_f64(),
        };
        let charge = |(&cause, time): (&WaitCause, &Duration)| Charge { cause, seconds: time.as_secs_f64() };
        waited.list(self.causes.iter().map(charge), limits::MAX_WAIT_CAUSES_OF_WORKER);
        waited
    }

    /// Charged and uncharged time MUST add up to the waited time.
    pub(crate) fn check(&self) -> Result<(), String> {
        let charged = self.causes.values().sum::<Duration>() + self.others;
        if charged + self.uncharged != self.waited {
            let (waited, uncharged) = (self.waited, self.uncharged);
            return Err(format!(
                "{charged:?} of {waited:?} of waiting are charged, and {uncharged:?} are not"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn push(rank: u32) -> WaitCause {
        WaitCause::Push(WorkerId(rank))
    }

    proptest! {
        #[test]
        fn delays_survive_the_wire(rank in 0..limits::MAX_WORKERS, micros in 0..1u64 << MICROS_BITS) {
            let delay = Some(Delay { by: WorkerId(rank), time: Duration::from_micros(micros) });
            prop_assert_eq!(Delay::from_bits(Delay::to_bits(delay)), delay);
        }

        #[test]
        fn whatever_a_peer_says_names_a_worker_or_nobody(bits: u64) {
            if let Some(delay) = Delay::from_bits(bits) {
                prop_assert!(delay.by.0 < limits::MAX_WORKERS);
                prop_assert_eq!(Delay::to_bits(Some(delay)), bits);
            }
        }
    }

    #[test]
    fn a_delay_has_its_limits() {
        assert_eq!((Delay::to_bits(None), Delay::from_bits(0)), (0, None));
        let longest = Delay { by: WorkerId(3), time: Duration::MAX };
        let heard = Delay::from_bits(Delay::to_bits(Some(longest))).unwrap();
        assert_eq!((heard.by, heard.time.as_micros()), (WorkerId(3), (1 << MICROS_BITS) - 1));
        assert_eq!(Delay::to_bits(Some(Delay { by: WorkerId::reader(0), time: SECOND })), 0);
    }

    #[test]
    fn no_more_is_charged_than_was_waited() {
        let mut tally = WaitTally::default();
        tally.charge(push(0), SECOND);
        assert_eq!(tally.report(), Waited::default());
        tally.add(3 * SECOND);
        tally.charge(push(1), 2 * SECOND);
        tally.charge(WaitCause::Servers, 5 * SECOND);
        tally.add(SECOND);
        let waited = tally.report();
        assert_eq!((waited.seconds, waited.charged()), (4.0, 3.0));
        assert_eq!((waited.of(push(1)), waited.of(WaitCause::Servers)), (2.0, 1.0));
        assert_eq!((tally.uncharged(), tally.check()), (SECOND, Ok(())));
    }

    #[test]
    fn small_causes_give_way_and_are_counted_all_the_same() {
        let mut tally = WaitTally::default();
        let many = 2 * limits::MAX_WAIT_CAUSES_KEPT as u32;
        for rank in 0..many {
            tally.add(rank * SECOND);
            tally.charge(push(rank), rank * SECOND);
        }
        let waited = tally.report();
        assert_eq!(
            (waited.causes.len(), waited.causes[0].cause),
            (limits::MAX_WAIT_CAUSES_OF_WORKER, push(many - 1))
        );
        assert_eq!((waited.charged(), tally.check()), (waited.seconds, Ok(())));
        assert!(tally.causes.len() <= limits::MAX_WAIT_CAUSES_KEPT);
    }

    #[test]
    fn tallies_add_up_whatever_peers_say() {
        let of = |rank, seconds| Waited {
            seconds,
            causes: vec![Charge { cause: push(rank), seconds }],
            others: 1.0,
        };
        let sum = Waited::sum([&of(3, 2.0), &of(3, 4.0), &of(1, 5.0), &of(2, f64::NAN), &of(2, -1.0)]);
        assert_eq!((sum.seconds, sum.of(push(3)), sum.of(push(2)), sum.others), (11.0, 6.0, 0.0, 5.0));
        assert_eq!(sum.causes[0].cause, push(3));
        let line = sum.lines(1).next().unwrap();
        assert_eq!(
            line,
            "waited for worker 3: 6.0 s of workers' time (55% of all waiting), because its pushes came last"
        );
        assert_eq!(sum.lines(9).count(), 2, "causes without time are not told of");
    }
}
