//! A loop that panics ends with a sentence, and so do those who would wait for it in vain.

use super::{EventLoop, FAREWELL, RoleCell};
use paramill_core::role::Role;
use paramill_core::types::NodeId;
use paramill_core::wire::control::{frame, sentence};
use paramill_core::wire::{Control, Kind};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

impl<C: RoleCell> EventLoop<C> {
    /// Turns until it is over, well or badly. After a panic the role is not asked for anything but who it is, and the
    /// other loops of this server end too: a process must not stay that only looks as if it served.
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

    /// Says what the role cannot say any more: a data core tells the coordinator, the coordinator everybody. Others are
    /// missed as any member is that goes away. Says whether there was somebody to tell.
    fn tell_of_panic(&mut self, why: &str) -> bool {
        let is_member = |peer: &&NodeId| !matches!(peer, NodeId::Admin(_));
        let listeners: Vec<NodeId> = match self.cell.with(|role| role.node()) {
            Some(NodeId::Coordinator) => self.peers.keys().filter(is_member).copied().collect(),
            Some(NodeId::Shard(_)) => vec![NodeId::Coordinator],
            _ => Vec::new(),
        };
        let message = frame(Kind::Control, &Control::Stop { error: Some(sentence(why.to_owned())) });
        let keys: Vec<u64> =
            listeners.iter().filter_map(|peer| self.peers.get(peer)).map(|peer| peer.key).collect();
        for key in &keys {
            self.dispatch(*key, message.clone());
        }
        self.flush_dirty();
        !keys.is_empty()
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it did not say why")
}
