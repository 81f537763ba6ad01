//! Commands from outside the job: `paramill status`, `paramill set`. They are strangers, so there are few of them, and
//! none of them stays without a word.

use crate::limits;
use crate::types::{NodeId, Time};
use crate::wire::{Refusal, Welcome};
use std::collections::BTreeMap;

/// The commands that are connected, by number, and when each was heard of last.
#[derive(Debug, Default)]
pub(super) struct Commands {
    last_heard: BTreeMap<u32, Time>,
    last_number: u32,
}

impl Commands {
    pub(super) fn accept(&mut self, now: Time) -> Result<Welcome, Refusal> {
        if self.last_heard.len() >= limits::MAX_COMMANDS {
            let reason = format!(
                "{} commands are connected to this coordinator, and it takes no more at a time; those that say nothing \
                 for {} s are hung up on: try again then",
                limits::MAX_COMMANDS,
                limits::COMMAND_IDLE.as_secs()
            );
            return Err(Refusal { reason, retry: true });
        }
        self.last_number = self.last_number.wrapping_add(1);
        self.last_heard.insert(self.last_number, now);
        Ok(Welcome { you: NodeId::Admin(self.last_number), incarnation: 0 })
    }

    pub(super) fn heard(&mut self, now: Time, number: u32) {
        if let Some(last_heard) = self.last_heard.get_mut(&number) {
            *last_heard = now;
        }
    }

    pub(super) fn lose(&mut self, number: u32) {
        self.last_heard.remove(&number);
    }

    /// The next command that has said nothing for too long. It counts no more.
    pub(super) fn poll_idle(&mut self, now: Time, awake_since: Time) -> Option<u32> {
        let is_idle = |(_, heard): &(&u32, &Time)| deadline(**heard, awake_since) <= now;
        let number = self.last_heard.iter().find(is_idle).map(|(number, _)| *number)?;
        self.last_heard.remove(&number);
        Some(number)
    }

    pub(super) fn next_timeout(&self, awake_since: Time) -> Option<Time> {
        self.last_heard.values().min().map(|heard| deadline(*heard, awake_since))
    }
}

fn deadline(heard: Time, awake_since: Time) -> Time {
    heard.max(awake_since) + limits::COMMAND_IDLE
}
