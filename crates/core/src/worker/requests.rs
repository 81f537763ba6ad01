//! The requests that are under way, found by number without a search.

use super::request::Request;

/// Requests by number. A number is used once; its lower half is a place that is used again.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests made so far.
    made: u64,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    /// With its turn: how many were made before it.
    request: Option<(u64, Request)>,
}

impl Requests {
    /// Files a request under a new number.
    pub(super) fn insert(&mut self, request: Request) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.request = Some((self.made, request));
        self.made += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    pub(super) fn get(&self, id: u64) -> Option<&Request> {
        let slot = self.slots.get(id as u32 as usize)?;
        slot.request.as_ref().filter(|_| u64::from(slot.generation) == id >> 32).map(|(_, request)| request)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Request> {
        let slot = self.slots.get_mut(id as u32 as usize)?;
        let is_it = u64::from(slot.generation) == id >> 32;
        slot.request.as_mut().filter(|_| is_it).map(|(_, request)| request)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.get(id)?;
        self.free.push(id as u32);
        self.slots[id as u32 as usize].request.take().map(|(_, request)| request)
    }

    /// All of them, in no order that means anything.
    pub(super) fn values(&self) -> impl Iterator<Item = &Request> {
        self.slots.iter().filter_map(|slot| slot.request.as_ref()).map(|(_, request)| request)
    }

    /// The numbers of those that are chosen, in the order in which they were made.
    pub(super) fn numbers(&self, choose: impl Fn(&Request) -> bool) -> Vec<u64> {
        let filed = (0u64..).zip(&self.slots);
        let mut chosen: Vec<(u64, u64)> = filed
            .filter_map(|(index, slot)| {
                let (turn, request) = slot.request.as_ref()?;
                choose(request).then_some((*turn, u64::from(slot.generation) << 32 | index))
            })
            .collect();
        chosen.sort_unstable();
        chosen.into_iter().map(|(_, id)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Ticket;
    use super::super::request::What;
    use super::*;
    use crate::types::{ServerId, ShardId};

    fn request(table: usize) -> Request {
        let shard = ShardId { server: ServerId(0), core: 0 };
        Request::new(shard, table, 0, Ticket(0), What::Pull { rows: None, now: false })
    }

    #[test]
    fn a_number_is_used_once_and_its_place_again() {
        let mut requests = Requests::default();
        let ids: Vec<u64> = (0..3).map(|table| requests.insert(request(table))).collect();
        assert_eq!(requests.remove(ids[0]).map(|request| request.table), Some(0));
        let next = requests.insert(request(3));
        assert_eq!(next as u32, ids[0] as u32, "the same place");
        assert!(requests.get(ids[0]).is_none() && requests.remove(ids[0]).is_none());
        assert!(requests.get_mut(u64::MAX).is_none() && requests.get_mut(0).is_none());
        assert_eq!(requests.get(next).map(|request| request.table), Some(3));
        // Older ones come first, wherever they lie.
        assert_eq!(requests.numbers(|_| true), [ids[1], ids[2], next]);
        assert_eq!(requests.values().count(), 3);
    }
}
