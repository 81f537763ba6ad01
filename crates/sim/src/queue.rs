//! Events ordered by virtual time; those of the same time keep the order in which they were added.

use paramill_core::types::Time;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What will happen. Events wait in a slab, so that the heap moves small keys only.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    heap: BinaryHeap<Reverse<(Time, u64, u32)>>,
    events: Vec<Option<E>>,
    free: Vec<u32>,
    added: u64,
}

impl<E> Queue<E> {
    pub(crate) fn new() -> Queue<E> {
        Queue { heap: BinaryHeap::new(), events: Vec::new(), free: Vec::new(), added: 0 }
    }

    pub(crate) fn push(&mut self, at: Time, event: E) {
        let place = match self.free.pop() {
            Some(place) => {
                self.events[place as usize] = Some(event);
                place
            }
            None => {
                self.events.push(Some(event));
                (self.events.len() - 1) as u32
            }
        };
        self.heap.push(Reverse((at, self.added, place)));
        self.added += 1;
    }

    pub(crate) fn next_time(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _, _))| *at)
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, E)> {
        let Reverse((at, _, place)) = self.heap.pop()?;
        self.free.push(place);
        let event = self.events[place as usize].take().expect("a key in the heap has an event in the slab");
        Some((at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_orders_and_ties_keep_their_order() {
        let mut queue = Queue::new();
        for (at, name) in [(5, "a"), (1, "b"), (5, "c"), (0, "d"), (5, "e")] {
            queue.push(Time(at), name);
        }
        assert_eq!(queue.next_time(), Some(Time(0)));
        let mut order = Vec::new();
        while let Some((_, name)) = queue.pop() {
            order.push(name);
        }
        assert_eq!(order, ["d", "b", "a", "c", "e"]);
    }
}
