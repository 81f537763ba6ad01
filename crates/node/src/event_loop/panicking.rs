//! The end of a loop that panicked: its error, and what its peers are told.

use super::{EventLoop, FAREWELL, RoleCell};
use paramill_core::role::{Frame, Role, Turn};
use paramill_core::types::{ConnectionId, NodeId};
use paramill_core::wire::control::{frame, sentence};
use paramill_core::wire::{Control, Kind};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

impl<C: RoleCell> EventLoop<C> {
    /// Turns until it is over, well or badly. After a panic the role is only asked for its node, and the other loops of this
    /// server end too: a process must not stay that only looks as if it served.
    pub(super) fn turn_to_the_end(&mut self) -> Result<(), String> {
        let turned = catch_unwind(AssertUnwindSafe(|| self.turn_until_stopped()));
        turned.unwrap_or_else(|panic| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("an unnamed thread");
            let why = format!("the event loop of `{name}` panicked: {}", words(&*panic));
            // A loop that panics again has nothing to tell, and ends all the same.
            let told = catch_unwind(AssertUnwindSafe(|| self.tell_of_panic(&why)));
            if told.unwrap_or(false) {
                // Those who were told end the job in their own words, before they are stopped here.
                std::thread::sleep(FAREWELL);
            }
            self.setup.stop.store(true, Ordering::Relaxed);
            Err(why)
        })
    }

    /// Sends a Stop frame in place of the role: a data core's to the coordinator, the coordinator's to every member. A worker
    /// or an aggregator sends none; its peers see the connection break. Returns whether somebody was told.
    fn tell_of_panic(&mut self, why: &str) -> bool {
        let is_member = |name: &&ConnectionId| !matches!(name.peer(), Some(NodeId::Admin(_)));
        let listeners: Vec<ConnectionId> = match self.cell.with(|role| role.node()) {
            Some(NodeId::Coordinator) => self.names.keys().filter(is_member).copied().collect(),
            Some(NodeId::Shard(_)) => vec![NodeId::Coordinator.into()],
            _ => Vec::new(),
        };
        let message = frame(Kind::Control, &Control::Stop { error: Some(sentence(why.to_owned())) });
        let keys: Vec<u64> =
            listeners.iter().filter_map(|name| self.names.get(name)).map(|named| named.key).collect();
        // A peer that cannot be told keeps no other from being told.
        let mut told =
            |key: &u64| catch_unwind(AssertUnwindSafe(|| self.tell(*key, message.clone()))).unwrap_or(false);
        keys.iter().filter(|key| told(key)).count() > 0
    }

    /// Sends a frame without the role: what waits before it must not be in the role's memory. Returns false if the connection
    /// is broken.
    fn tell(&mut self, key: u64, frame: Frame) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else { return false };
        connection.carrier.queue(frame, Turn::InOrder);
        connection.carrier.flush(None, false).is_ok()
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it did not say why")
}

#[cfg(test)]
mod tests;
