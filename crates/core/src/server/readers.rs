//! Readers as a shard sees them: they have their numbers from the coordinator, and can do nothing here but follow streams.

use crate::limits;
use crate::types::WorkerId;
use crate::wire::Refusal;
use std::collections::BTreeMap;

/// Readers that are connected.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Which process has each number.
    incarnations: BTreeMap<WorkerId, u64>,
}

impl Readers {
    pub(super) fn has(&self, id: WorkerId) -> bool {
        self.incarnations.contains_key(&id)
    }

    /// A reader says hello.
    pub(super) fn admit(&mut self, id: WorkerId, incarnation: u64) {
        self.incarnations.insert(id, incarnation);
    }

    /// Whether a reader that says hello is welcome.
    pub(super) fn check(&self, id: WorkerId, incarnation: u64) -> Result<(), Refusal> {
        let refuse = |reason: String, retry| Err(Refusal { reason, retry });
        if !id.is_reader() || incarnation == 0 {
            return refuse("a reader gets its number from the coordinator first".into(), false);
        }
        if self.incarnations.get(&id).is_some_and(|known| *known != incarnation) {
            return refuse(format!("another process is {id} here"), true);
        }
        if self.incarnations.len() >= limits::MAX_READERS && !self.has(id) {
            let most = limits::MAX_READERS;
            return refuse(format!("this server has {most} readers, and takes no more"), true);
        }
        Ok(())
    }

    pub(super) fn lose(&mut self, id: WorkerId) {
        self.incarnations.remove(&id);
    }
}
