//! The payload of a group frame: whose pushes are complete in the sums that an aggregator sent before it.
//!
//! Sixteen bytes each, little-endian: rank (u32), whether parameters are wanted (u32, 0 or 1), request (u64).

use super::WireError;
use crate::limits;
use crate::types::WorkerId;

const ENTRY_BYTES: usize = 16;
/// The longest payload of a group frame.
pub const MAX_BYTES: usize = limits::MAX_WORKERS as usize * ENTRY_BYTES;

/// The longest payload of a frame that says whose gradients are in sums.
pub const MAX_RANK_BYTES: usize = limits::MAX_WORKERS as usize * 4;

/// A worker whose push is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The worker that pushed.
    pub worker: WorkerId,
    /// Answer with the parameters when the condition allows, as if a pull followed.
    pub want_params: bool,
    /// The aggregator's number for this push; answers repeat it.
    pub request: u64,
}

/// The bytes of some entries.
pub fn encode(entries: impl IntoIterator<Item = Entry>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in entries {
        bytes.extend_from_slice(&entry.worker.0.to_le_bytes());
        bytes.extend_from_slice(&u32::from(entry.want_params).to_le_bytes());
        bytes.extend_from_slice(&entry.request.to_le_bytes());
    }
    bytes
}

/// The entries, each of another worker and in the order of their ranks.
pub fn decode(payload: &[u8]) -> Result<Vec<Entry>, WireError> {
    let wrong = |why: String| WireError::Payload { what: "group", why };
    let (entries, rest) = payload.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() || payload.len() > MAX_BYTES {
        return Err(wrong(format!("{} bytes are no list of workers", payload.len())));
    }
    let mut decoded: Vec<Entry> = Vec::with_capacity(entries.len());
    for bytes in entries {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let worker = WorkerId(word(0));
        if decoded.last().is_some_and(|before| before.worker >= worker) || word(4) > 1 {
            return Err(wrong("workers out of order, or an undefined wish".into()));
        }
        let request = u64::from(word(8)) | u64::from(word(12)) << 32;
        decoded.push(Entry { worker, want_params: word(4) == 1, request });
    }
    Ok(decoded)
}

/// The ranks of the workers whose gradients are in sums: four bytes each, ascending.
pub fn encode_ranks(workers: &[WorkerId]) -> Vec<u8> {
    workers.iter().flat_map(|worker| worker.0.to_le_bytes()).collect()
}

/// Reads what [`encode_ranks`] has written.
pub fn decode_ranks(payload: &[u8]) -> Result<Vec<WorkerId>, WireError> {
    let wrong = |why: String| WireError::Payload { what: "contributors", why };
    let (ranks, rest) = payload.as_chunks::<4>();
    if !rest.is_empty() || payload.len() > MAX_RANK_BYTES {
        return Err(wrong(format!("{} bytes are no list of ranks", payload.len())));
    }
    let workers: Vec<WorkerId> = ranks.iter().map(|bytes| WorkerId(u32::from_le_bytes(*bytes))).collect();
    let is_sorted = workers.is_sorted_by(|one, next| one < next);
    if !is_sorted || workers.last().is_some_and(|last| last.0 >= limits::MAX_WORKERS) {
        return Err(wrong("ranks out of order, or out of range".into()));
    }
    Ok(workers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_survive_the_wire_and_other_bytes_fail_cleanly(
            ranks in prop::collection::btree_set(0..limits::MAX_WORKERS, 0..20),
            bytes in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let workers: Vec<WorkerId> = ranks.into_iter().map(WorkerId).collect();
            prop_assert_eq!(decode_ranks(&encode_ranks(&workers)), Ok(workers));
            if let Ok(workers) = decode_ranks(&bytes) {
                prop_assert_eq!(encode_ranks(&workers), bytes);
            }
        }

        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(entries) = decode(&bytes) {
                prop_assert_eq!(encode(entries), bytes);
            }
        }

        #[test]
        fn entries_survive_the_wire(ranks in prop::collection::btree_set(any::<u32>(), 0..20), request: u64) {
            let entry = |rank| Entry { worker: WorkerId(rank), want_params: rank % 2 == 0, request };
            let entries: Vec<Entry> = ranks.into_iter().map(entry).collect();
            prop_assert_eq!(decode(&encode(entries.clone())), Ok(entries));
        }
    }

    #[test]
    fn a_worker_is_named_once() {
        let entry = Entry { worker: WorkerId(3), want_params: false, request: 1 };
        assert!(decode(&encode([entry, entry])).is_err());
    }
}
