//! Promises that are watched while a job runs, one file each. A broken one is a sentence that names the node, the
//! table and the clock; the world adds the time.

mod copies;
mod exactly_once;
mod held;
mod layout;
mod memory;
mod owners;
mod policies;
mod readers;
mod replicas;
mod staleness;
mod trace;

pub use copies::Copies;
pub use exactly_once::ExactlyOnce;
pub use held::Held;
pub use memory::Memory;
pub use owners::Owners;
pub use readers::Readers;
pub use replicas::Replicas;
pub use staleness::Staleness;
pub use trace::Trace;

use crate::actor::Actor;
use crate::cluster::Cluster;
use crate::rule::FrameView;
use crate::world::Observer;
use paramill_core::types::{NodeId, Time};
use std::fmt::Debug;

/// Watches one promise. No method is required; an error is a broken promise.
pub trait Checker: Debug {
    /// A frame is sent; `sender` is as it was when it sent it.
    fn on_sent(&mut self, frame: &FrameView<'_>, sender: &Actor) -> Result<(), String> {
        let _ = (frame, sender);
        Ok(())
    }

    /// A frame is about to be handled.
    fn on_delivered(&mut self, frame: &FrameView<'_>, receiver: &Actor) -> Result<(), String> {
        let _ = (frame, receiver);
        Ok(())
    }

    /// A node has handled an event.
    fn on_settled(&mut self, now: Time, node: NodeId, actor: &Actor) -> Result<(), String> {
        let _ = (now, node, actor);
        Ok(())
    }

    /// The job is over.
    fn at_end(&mut self, cluster: &Cluster) -> Result<(), String> {
        let _ = cluster;
        Ok(())
    }
}

/// Several checkers, as one observer.
#[derive(Debug, Default)]
pub struct Checkers {
    checkers: Vec<Box<dyn Checker>>,
}

impl Checkers {
    /// Adds a checker.
    pub fn add(&mut self, checker: impl Checker + 'static) {
        self.checkers.push(Box::new(checker));
    }

    /// What there is to say when the job is over.
    pub fn at_end(&mut self, cluster: &Cluster) -> Result<(), String> {
        self.checkers.iter_mut().try_for_each(|checker| checker.at_end(cluster))
    }
}

impl Observer<Actor> for Checkers {
    fn on_sent(&mut self, frame: &FrameView<'_>, role: &Actor) -> Result<(), String> {
        self.checkers.iter_mut().try_for_each(|checker| checker.on_sent(frame, role))
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, role: &Actor) -> Result<(), String> {
        self.checkers.iter_mut().try_for_each(|checker| checker.on_delivered(frame, role))
    }

    fn on_settled(&mut self, now: Time, node: NodeId, role: &Actor) -> Result<(), String> {
        self.checkers.iter_mut().try_for_each(|checker| checker.on_settled(now, node, role))
    }
}
