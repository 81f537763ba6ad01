//! Nodes that cost others much of their time: the log names them.

use super::workers::Workers;
use crate::limits;
use crate::types::Time;
use crate::waits::{WaitCause, Waited, WaitedNode};
use std::collections::BTreeMap;

/// Compares what nodes have cost others from one look to the next.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    /// When the last look was.
    looked: Option<Time>,
    /// What each node had cost by then, in seconds.
    costs: BTreeMap<WaitedNode, f64>,
    /// The node that the log named, as long as it goes on.
    named: Option<WaitedNode>,
    /// When it did.
    said: Option<Time>,
}

impl Stragglers {
    /// Looks at what workers waited for, when it is time to: a line for the log if another node than before costs much.
    /// A server that is the only one costs what exchanges take, and is not named.
    pub(super) fn judge(&mut self, now: Time, workers: &Workers, servers: u32) -> Option<String> {
        self.compare(now, workers.running().count(), servers, || workers.waited())
    }

    fn compare(
        &mut self,
        now: Time,
        workers: usize,
        servers: u32,
        waited: impl FnOnce() -> Waited,
    ) -> Option<String> {
        let looked = *self.looked.get_or_insert(now);
        let window = now.since(looked);
        if window < limits::STRAGGLER_WINDOW {
            return None;
        }
        let mut costs = BTreeMap::<WaitedNode, f64>::new();
        for charge in waited().causes {
            if let Some(node) = charge.cause.node() {
                *costs.entry(node).or_default() += charge.seconds;
            }
        }
        let share = |(&node, &cost): (&WaitedNode, &f64)| {
            let before = self.costs.get(&node).copied().unwrap_or(0.0);
            let others = match node {
                WaitedNode::Worker(_) => workers.saturating_sub(1),
                WaitedNode::Server(_) if servers > 1 => workers,
                WaitedNode::Server(_) => 0,
            };
            (others > 0).then(|| (node, (cost - before) / (others as f64 * window.as_secs_f64())))
        };
        let worst = costs.iter().filter_map(share).max_by(|(_, one), (_, other)| one.total_cmp(other));
        let worst = worst.filter(|(_, share)| *share > limits::STRAGGLER_SHARE);
        (self.looked, self.costs) = (Some(now), costs);
        let Some((node, share)) = worst else {
            self.named = None;
            return None;
        };
        let is_early = self.said.is_some_and(|said| now.since(said) < limits::STRAGGLER_LOG_EVERY);
        if self.named == Some(node) || is_early {
            return None;
        }
        (self.named, self.said) = (Some(node), Some(now));
        let (others, why) = match node {
            WaitedNode::Worker(_) => ("the others", "its pushes come last, or it does to barriers"),
            WaitedNode::Server(_) => ("the workers", "its answers come last"),
        };
        let (percent, seconds) = (100.0 * share, window.as_secs_f64());
        Some(format!(
            "{node} cost {others} {percent:.0}% of their time in the last {seconds:.0} s: {why}; `paramill status` has the sums"
        ))
    }
}

/// Lines for the log of a job that ends: the nodes with much of all waiting.
pub(super) fn summary(waited: &Waited, servers: u32) -> Vec<String> {
    let much = (limits::STRAGGLER_SHARE * waited.seconds).max(1.0);
    let is_one_of_many = |cause: &WaitCause| match cause.node() {
        Some(WaitedNode::Worker(_)) => true,
        Some(WaitedNode::Server(_)) => servers > 1,
        None => false,
    };
    let told =
        waited.texts(usize::MAX).filter(|(cause, _)| is_one_of_many(cause) && waited.of(*cause) > much);
    told.map(|(cause, text)| format!("the job waited for {cause}: {text}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ServerId, WorkerId};
    use crate::waits::Charge;

    fn waited(charges: &[(WaitCause, f64)]) -> Waited {
        let charge = |&(cause, seconds): &(WaitCause, f64)| Charge { cause, seconds };
        let causes: Vec<Charge> = charges.iter().map(charge).collect();
        Waited { seconds: 1e6, causes, others: 0.0 }
    }

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    #[test]
    fn a_straggler_is_named_once_until_it_is_another_one() {
        let mut stragglers = Stragglers::default();
        let mut judge = |seconds, charges: &[(WaitCause, f64)]| {
            let said = stragglers.compare(at(seconds), 4, 2, || waited(charges));
            said.map(|sentence| sentence.split(':').next().unwrap().to_owned())
        };
        let push = |rank| WaitCause::Push(WorkerId(rank));
        let server = WaitCause::Server(ServerId(1));
        assert_eq!(judge(0, &[(push(1), 500.0)]), None, "the window has just begun");
        let first = "worker 1 cost the others 50% of their time in the last 30 s";
        assert_eq!(judge(30, &[(push(1), 40.0), (WaitCause::Barrier(WorkerId(1)), 5.0)]), Some(first.into()));
        assert_eq!(judge(60, &[(push(1), 100.0)]), None, "it goes on");
        assert_eq!(judge(90, &[(push(1), 118.0), (server, 24.0)]), None, "20% and not more");
        let second = "server 1 cost the workers 50% of their time in the last 30 s";
        assert_eq!(judge(120, &[(push(1), 118.0), (server, 84.0)]), Some(second.into()));
        assert_eq!(judge(150, &[(push(2), 80.0), (server, 84.0)]), None, "too early");
        assert!(judge(180, &[(push(2), 160.0), (server, 84.0)]).is_some(), "and still so a minute later");
    }

    #[test]
    fn a_job_that_ends_tells_of_those_with_much_of_all_waiting() {
        let (push, server) = (WaitCause::Push(WorkerId(1)), WaitCause::Server(ServerId(0)));
        let waited = |seconds| Waited { seconds, ..waited(&[(push, 5.0), (server, 4.0)]) };
        assert_eq!(summary(&waited(10.0), 2).len(), 2);
        let of_worker = "the job waited for worker 1: 5.0 s of workers' time (50% of all waiting), because its pushes came last";
        assert_eq!(summary(&waited(10.0), 1), [of_worker]);
        assert!(summary(&waited(100.0), 2).is_empty(), "a twentieth");
    }

    #[test]
    fn neither_the_only_server_nor_the_only_worker_is_a_straggler() {
        for (workers, servers, cause) in
            [(4, 1, WaitCause::Server(ServerId(0))), (1, 2, WaitCause::Push(WorkerId(0)))]
        {
            let mut stragglers = Stragglers::default();
            stragglers.compare(at(0), workers, servers, Waited::default);
            assert_eq!(stragglers.compare(at(30), workers, servers, || waited(&[(cause, 100.0)])), None);
        }
    }
}
