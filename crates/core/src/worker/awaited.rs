//! Requests that the worker's own replica will answer, once a stream has brought what they ask for.

use super::local_table::LocalTable;
use super::requests::Requests;
use super::streams::StreamId;
use std::collections::BTreeMap;

/// The numbers of such requests, by the stream that they wait for. Some may have been given up since.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    by_stream: BTreeMap<StreamId, Vec<u64>>,
}

impl Awaited {
    pub(super) fn add(&mut self, stream: StreamId, request: u64) {
        self.by_stream.entry(stream).or_default().push(request);
    }

    pub(super) fn streams(&self) -> Vec<StreamId> {
        self.by_stream.keys().copied().collect()
    }

    /// Takes out the requests that what `local` has of the stream answers, in the order in which they were made.
    pub(super) fn take_answered(
        &mut self,
        stream: StreamId,
        requests: &Requests,
        local: &LocalTable,
    ) -> Vec<u64> {
        let Some(waiting) = self.by_stream.get_mut(&stream) else { return Vec::new() };
        let mut answered = Vec::new();
        waiting.retain(|&id| {
            let Some(request) = requests.get(id).filter(|request| request.wants_params()) else {
                return false;
            };
            let is_answered = request.is_answered_by(local);
            if is_answered {
                answered.push(id);
            }
            !is_answered
        });
        if waiting.is_empty() {
            self.by_stream.remove(&stream);
        }
        answered
    }
}
