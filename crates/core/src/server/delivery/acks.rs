//! Acknowledgements that are due, until everything else has left.
//!
//! A data core handles many frames between two turns of its driver. What it acknowledges meanwhile goes to each worker
//! in one frame, behind the parameters, so that a thousand small pushes do not cost a thousand frames.

use crate::role::Output;
use crate::types::{NodeId, WorkerId};
use crate::wire::ack;

/// Requests to acknowledge, by rank.
#[derive(Debug, Default)]
pub(super) struct Acks {
    by_rank: Vec<Vec<u64>>,
    /// Workers with something to acknowledge.
    due: Vec<WorkerId>,
}

impl Acks {
    pub(super) fn add(&mut self, worker: WorkerId, request: u64) {
        let rank = worker.0 as usize;
        if self.by_rank.len() <= rank {
            self.by_rank.resize_with(rank + 1, Vec::new);
        }
        if self.by_rank[rank].is_empty() {
            self.due.push(worker);
        }
        self.by_rank[rank].push(request);
    }

    /// The next frame to send.
    pub(super) fn pop(&mut self) -> Option<Output> {
        let worker = *self.due.last()?;
        let requests = &mut self.by_rank[worker.0 as usize];
        let some = requests.len().min(ack::MAX_REQUESTS);
        let frame = ack::frame(&requests[..some]);
        requests.drain(..some);
        if requests.is_empty() {
            self.due.pop();
        }
        Some(Output::send(NodeId::Worker(worker), frame))
    }

    /// The connection to a worker is gone, and what was to be sent on it.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        if let Some(requests) = self.by_rank.get_mut(worker.0 as usize) {
            requests.clear();
        }
        self.due.retain(|due| *due != worker);
    }

    /// Bytes of memory that wait.
    pub(super) fn bytes(&self) -> usize {
        self.due.iter().map(|worker| self.by_rank[worker.0 as usize].len() * 8).sum()
    }

    /// Compares the workers that are due with the requests that wait.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut due = self.due.clone();
        due.sort_unstable();
        let waiting = (0..).map(WorkerId).zip(&self.by_rank).filter(|(_, requests)| !requests.is_empty());
        let waiting: Vec<WorkerId> = waiting.map(|(worker, _)| worker).collect();
        if due != waiting {
            return Err(format!("acknowledgements are due to {due:?}, and wait for {waiting:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::Frame;
    use crate::types::ConnectionId;

    fn drain(acks: &mut Acks) -> Vec<(ConnectionId, Vec<u64>)> {
        let frames = std::iter::from_fn(|| acks.pop());
        let read = |output| match output {
            Output::Send { to, frame: Frame { header, body }, .. } => {
                (to, ack::requests(&header, body.bytes().unwrap()).unwrap().collect())
            }
            other => panic!("{other:?}"),
        };
        frames.map(read).collect()
    }

    #[test]
    fn each_worker_hears_of_all_its_requests_in_one_frame() {
        let mut acks = Acks::default();
        for (worker, request) in [(2, 5), (0, 6), (2, 7), (1, 8)] {
            acks.add(WorkerId(worker), request);
        }
        assert_eq!((acks.bytes(), acks.check()), (32, Ok(())), "eight bytes for each request");
        acks.forget(WorkerId(1));
        assert_eq!((acks.bytes(), acks.check()), (24, Ok(())));
        let mut heard = drain(&mut acks);
        heard.sort_by_key(|(to, _)| *to);
        assert_eq!(
            heard,
            [(NodeId::Worker(WorkerId(0)).into(), vec![6]), (NodeId::Worker(WorkerId(2)).into(), vec![5, 7])]
        );
        assert_eq!((acks.bytes(), drain(&mut acks)), (0, vec![]));
    }

    #[test]
    fn more_than_fit_a_frame_take_several() {
        let mut acks = Acks::default();
        let all: Vec<u64> = (0..ack::MAX_REQUESTS as u64 + 3).collect();
        all.iter().for_each(|request| acks.add(WorkerId(0), *request));
        let heard: Vec<Vec<u64>> = drain(&mut acks).into_iter().map(|(_, requests)| requests).collect();
        assert_eq!(heard.len(), 2);
        assert_eq!(heard.concat(), all);
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut acks = Acks::default();
        acks.add(WorkerId(2), 1);
        acks.due.clear();
        assert!(acks.check().is_err(), "an acknowledgement that never leaves");
    }
}
