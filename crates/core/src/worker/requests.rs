//! The requests that are under way, found by number without a search.

use super::layout::Share;
use super::request::{Acknowledged, Request};
use super::session::Session;
use super::tables::Tables;
use super::ticket::{Expected, Ticket, Tickets};
use crate::landing::{Destination, Landing};
use crate::limits;
use crate::types::{Clock, ShardId};
use crate::wire::frame::Params;
use crate::wire::{Header, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// Requests by number. A number is used once; its lower half is a place that is used again.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Requests made so far.
    made: u64,
    /// For each clock with pushes that servers do not have: how many.
    unacknowledged: BTreeMap<Clock, usize>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    filed: Option<Filed>,
}

#[derive(Debug)]
struct Filed {
    /// How many requests were made before it.
    turn: u64,
    request: Request,
}

impl Requests {
    /// Files a request under a new number.
    pub(super) fn insert(&mut self, request: Request) -> u64 {
        if request.is_unacknowledged_push() {
            *self.unacknowledged.entry(request.clock()).or_default() += 1;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.filed = Some(Filed { turn: self.made, request });
        self.made += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    pub(super) fn get(&self, id: u64) -> Option<&Request> {
        let slot = self.slots.get(id as u32 as usize)?;
        slot.filed.as_ref().filter(|_| u64::from(slot.generation) == id >> 32).map(|filed| &filed.request)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Request> {
        let slot = self.slots.get_mut(id as u32 as usize)?;
        let is_it = u64::from(slot.generation) == id >> 32;
        slot.filed.as_mut().filter(|_| is_it).map(|filed| &mut filed.request)
    }

    /// Changes those of these numbers.
    pub(super) fn visit(&mut self, ids: &[u64], change: impl Fn(&mut Request)) {
        ids.iter().for_each(|&id| self.get_mut(id).into_iter().for_each(&change));
    }

    /// Forgets a request that is settled, or whose ticket was given up.
    pub(super) fn remove(&mut self, id: u64) -> Option<Request> {
        self.acknowledge(id);
        self.get(id)?;
        self.free.push(id as u32);
        self.slots[id as u32 as usize].filed.take().map(|filed| filed.request)
    }

    /// The server has what a request brought, or will not take it. `None` when it said so before.
    pub(super) fn acknowledge(&mut self, id: u64) -> Option<Acknowledged> {
        let request = self.get_mut(id)?;
        let (is_push, clock) = (request.is_unacknowledged_push(), request.clock());
        let acknowledged = request.acknowledge()?;
        if is_push && let Some(count) = self.unacknowledged.get_mut(&clock) {
            *count -= 1;
            if *count == 0 {
                self.unacknowledged.remove(&clock);
            }
        }
        Some(acknowledged)
    }

    /// The oldest clock with a push that some server does not have.
    pub(super) fn oldest_unacknowledged(&self) -> Option<Clock> {
        self.unacknowledged.keys().next().copied()
    }

    /// How many clocks have such pushes.
    pub(super) fn clocks_unacknowledged(&self) -> usize {
        self.unacknowledged.len()
    }

    /// How many of them are to bring a block of a table.
    pub(super) fn blocks_of(&self, table: usize) -> usize {
        let brings_block = |request: &&Request| {
            request.table() == table && request.fetch().is_some() && request.wants_params()
        };
        self.values().filter(brings_block).count()
    }

    /// All of them, in no order that means anything.
    pub(super) fn values(&self) -> impl Iterator<Item = &Request> {
        self.slots.iter().filter_map(|slot| slot.filed.as_ref()).map(|filed| &filed.request)
    }

    /// Whether somebody waits for requests about a table. Nobody waits for what a partial pull went on without.
    pub(super) fn are_waited_for(&self, table: usize, tickets: &Tickets) -> bool {
        self.values().any(|request| request.table() == table && tickets.contains(request.ticket()))
    }

    /// Whether the worker has re-sent a push, by another request.
    pub(super) fn send_again(&self, push: &Request) -> bool {
        self.values().any(|other| other.is_same_push(push) && other.must_be_sent())
    }

    /// Whether a share of the answers to a ticket's requests is here.
    pub(super) fn have_share(&self, ticket: Ticket, share: Share, tables: &Tables) -> bool {
        let mut its = self.values().filter(|request| request.ticket() == ticket);
        its.all(|request| request.has_share(tables[request.table()].layout(), share))
    }

    /// The application goes on without the end of those requests of a ticket for which a copy would do.
    pub(super) fn leave_behind(&mut self, ticket: Ticket) {
        let filed = self.slots.iter_mut().filter_map(|slot| slot.filed.as_mut());
        let is_its = |request: &&mut Request| request.ticket() == ticket && request.takes_copy();
        filed.map(|filed| &mut filed.request).filter(is_its).for_each(Request::leave_behind);
    }

    /// Whether servers lack pushes that the application does not wait for any more.
    pub(super) fn has_unsaved(&self) -> bool {
        !self.unacknowledged.is_empty()
            && self.values().any(|request| request.is_left_behind() && request.is_unacknowledged_push())
    }

    /// Where the payloads of an answer of a shard belong, from this frame on. See [`Role::landing`](crate::role::Role::landing).
    pub(super) fn landing(
        &self,
        tables: &mut Tables,
        shard: ShardId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        let params = Some(header).filter(|header| header.kind == Kind::Params).map(Params::decode)?;
        let request = self.get(params.subject.request).filter(|request| request.shard() == shard)?;
        let local = &mut tables[request.table()];
        let is_current = params.subject.epoch == local.valid_from();
        let fetch = request.foresee(&params, local.layout(), frames, places).filter(|_| is_current)?;
        places.first().filter(|place| place.may_have(header.payload_bytes as usize))?;
        local.destination(Some(fetch), shard, params.form.is_encoded())
    }

    /// What is to come for a ticket.
    pub(super) fn expected_by(&self, ticket: Ticket) -> Expected {
        let mut expected = Expected::default();
        self.values().filter(|request| request.ticket() == ticket).for_each(|request| expected.add(request));
        expected
    }

    /// The shards that have not answered all of what a ticket waits for.
    pub(super) fn unanswered(&self, ticket: Ticket) -> Vec<ShardId> {
        let its = self.values().filter(|request| request.ticket() == ticket);
        let shards: BTreeSet<ShardId> = its.map(Request::shard).collect();
        shards.into_iter().take(limits::MAX_UNANSWERED_REPORTED).collect()
    }

    /// The end of a sentence, about servers that a ticket waits for; a few of them.
    pub(super) fn silent_servers(&self, ticket: Ticket, session: &Session) -> String {
        let its = self.values().filter(|request| request.ticket() == ticket);
        let sentence = |request: &Request| match session.link(request.shard()).map(|link| (link, link.why()))
        {
            Some((link, Some(why))) => format!("{link} is not connected ({why})"),
            Some((_, None)) | None => format!("{} has not answered", request.shard()),
        };
        let silent: Vec<String> = its.map(sentence).take(4).collect();
        if silent.is_empty() { String::new() } else { format!("; {}", silent.join(", ")) }
    }

    /// The numbers of those that are chosen, in the order in which they were made.
    pub(super) fn numbers(&self, choose: impl Fn(&Request) -> bool) -> Vec<u64> {
        let filed = (0u64..).zip(&self.slots);
        let mut chosen: Vec<(u64, u64)> = filed
            .filter_map(|(index, slot)| {
                let Filed { turn, request } = slot.filed.as_ref()?;
                choose(request).then_some((*turn, u64::from(slot.generation) << 32 | index))
            })
            .collect();
        chosen.sort_unstable();
        chosen.into_iter().map(|(_, id)| id).collect()
    }

    /// Checks the counts of unacknowledged requests against the requests.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut counted: BTreeMap<Clock, usize> = BTreeMap::new();
        for request in self.values().filter(|request| request.is_unacknowledged_push()) {
            *counted.entry(request.clock()).or_default() += 1;
        }
        if counted != self.unacknowledged {
            return Err(format!("pushes of {counted:?} wait, and {:?} are said to", self.unacknowledged));
        }
        let filed = self.values().count();
        if filed + self.free.len() != self.slots.len() {
            return Err(format!(
                "{filed} requests and {} free places in {}",
                self.free.len(),
                self.slots.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Ticket;
    use super::super::request::RequestKind;
    use super::*;
    use crate::types::ServerId;

    fn request(table: usize) -> Request {
        let shard = ShardId { server: ServerId(0), core: 0 };
        Request::new(shard, table, 0, Ticket(0), RequestKind::Pull { rows: None, now: false })
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        let mut requests = Requests::default();
        requests.insert(request(0));
        requests.free.push(0);
        assert!(requests.check().is_err(), "a free place with a request in it");
        let mut requests = Requests::default();
        requests.unacknowledged.insert(3, 1);
        assert!(requests.check().is_err(), "a push that nobody makes");
    }

    #[test]
    fn a_number_is_used_once_and_its_place_again() {
        let mut requests = Requests::default();
        let ids: Vec<u64> = (0..3).map(|table| requests.insert(request(table))).collect();
        assert_eq!(requests.remove(ids[0]).map(|request| request.table()), Some(0));
        let next = requests.insert(request(3));
        assert_eq!(next as u32, ids[0] as u32, "the same place");
        assert!(requests.get(ids[0]).is_none() && requests.remove(ids[0]).is_none());
        assert!(requests.get_mut(u64::MAX).is_none() && requests.get_mut(0).is_none());
        assert_eq!(requests.get(next).map(Request::table), Some(3));
        // Older ones come first, wherever they lie.
        assert_eq!(requests.numbers(|_| true), [ids[1], ids[2], next]);
        assert_eq!(requests.values().count(), 3);
        assert_eq!(requests.check(), Ok(()));
    }
}
