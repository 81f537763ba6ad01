//! Frames on shared links: when they arrive is known only later.

use super::channel::Flight;
use paramill_core::fault::Delay;

/// Frames by the numbers that the network knows them by.
#[derive(Debug, Default)]
pub(super) struct Travelling {
    frames: Vec<Option<(Flight, Delay)>>,
    free: Vec<u32>,
}

impl Travelling {
    /// Keeps a frame, and what holds it back when it arrives; says its number.
    pub(super) fn put(&mut self, flight: Flight, delay: Delay) -> u32 {
        match self.free.pop() {
            Some(number) => {
                self.frames[number as usize] = Some((flight, delay));
                number
            }
            None => {
                self.frames.push(Some((flight, delay)));
                (self.frames.len() - 1) as u32
            }
        }
    }

    /// A frame is through.
    pub(super) fn take(&mut self, number: u32) -> (Flight, Delay) {
        self.free.push(number);
        self.frames[number as usize].take().expect("a frame arrives once")
    }
}
