use crate::rule::{FrameView, Rule};
use paramill_core::fault::{Fate, FaultPlan, FrameFaults};

/// The delays and resets that a fault plan asks for.
#[derive(Debug)]
pub struct Injected {
    faults: FrameFaults,
}

impl Injected {
    /// The plan's rules on frames, with their dice.
    pub fn new(plan: &FaultPlan, seed: u64) -> Injected {
        Injected { faults: FrameFaults::new(plan, seed) }
    }

    /// Whether the plan concerns no frame at all.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }
}

impl Rule for Injected {
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        self.faults.fate(frame.from, frame.to, frame.header)
    }
}
