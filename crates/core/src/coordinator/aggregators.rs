//! Aggregators: who they are and where. The job goes on whether they are here or not; workers that were told to go
//! through one wait for it themselves.

use super::memory::AggregatorState;
use crate::address::Addresses;
use crate::limits;
use crate::standstill::Standstill;
use crate::status::{AggregatorReport, AggregatorStatus};
use crate::types::{AggregatorId, NodeId, ProcessId, Time};
use crate::wire::{Refusal, Welcome};
use std::collections::BTreeMap;
use std::time::Duration;

/// The job's aggregators.
#[derive(Debug, Default)]
pub(super) struct Aggregators {
    members: BTreeMap<AggregatorId, Aggregator>,
}

/// An aggregator as the coordinator knows it.
#[derive(Debug)]
struct Aggregator {
    process: ProcessId,
    address: String,
    connected: bool,
    /// When it was heard last; later by the time that the coordinator has stood still since.
    last_heard: Time,
    /// The plan was sent on this connection.
    informed: bool,
    report: AggregatorReport,
}

impl Aggregators {
    /// What has to be remembered of those that are here.
    pub(super) fn remembered(&self) -> Vec<AggregatorState> {
        let state = |(id, member): (AggregatorId, &Aggregator)| AggregatorState {
            id,
            process: member.process,
            address: member.address.clone(),
        };
        self.connected().map(state).collect()
    }

    /// Goes on with what was remembered: they are away, and may come back.
    pub(super) fn restore(&mut self, now: Time, members: &[AggregatorState]) {
        for AggregatorState { id, process, address } in members {
            let member = Aggregator {
                process: *process,
                address: address.clone(),
                connected: false,
                last_heard: now,
                informed: false,
                report: AggregatorReport::default(),
            };
            self.members.insert(*id, member);
        }
    }

    pub(super) fn accept(
        &mut self,
        now: Time,
        process: ProcessId,
        wanted: Option<AggregatorId>,
    ) -> Result<Welcome, Refusal> {
        let known = self.members.iter().find(|(_, member)| member.process == process).map(|(id, _)| *id);
        let free =
            || (0..limits::MAX_AGGREGATORS).map(AggregatorId).find(|id| !self.members.contains_key(id));
        let id = known.or(wanted).or_else(free).filter(|id| id.0 < limits::MAX_AGGREGATORS);
        let Some(id) = id else {
            let reason = format!("a job has aggregators 0 to {}", limits::MAX_AGGREGATORS - 1);
            return Err(Refusal { reason, retry: false });
        };
        match self.members.get(&id) {
            Some(member) if member.process != process && member.connected => {
                let reason = format!("{id} is another process already; give each its own number, or none");
                // It may be gone, and not known to be.
                return Err(Refusal { reason, retry: true });
            }
            Some(member) if member.connected => {
                return Err(Refusal { reason: format!("{id} is here already"), retry: true });
            }
            // It was started anew.
            Some(member) if member.process != process => {
                self.members.remove(&id);
            }
            _ => {}
        }
        let fresh = || Aggregator {
            process,
            address: String::new(),
            connected: true,
            last_heard: now,
            informed: false,
            report: AggregatorReport::default(),
        };
        let member = self.members.entry(id).or_insert_with(fresh);
        member.connected = true;
        member.last_heard = now;
        member.informed = false;
        Ok(Welcome { you: NodeId::Aggregator(id), incarnation: process.0, session: 0 })
    }

    /// Before the plan an aggregator that goes away leaves its place to another.
    pub(super) fn lose(&mut self, id: AggregatorId, is_planned: bool) {
        if !is_planned {
            self.members.remove(&id);
        } else if let Some(member) = self.members.get_mut(&id) {
            member.connected = false;
            member.informed = false;
        }
    }

    /// An aggregator says something. Whether it is connected: one that was given up may still be heard.
    pub(super) fn heard(&mut self, now: Time, id: AggregatorId) -> bool {
        let member = self.members.get_mut(&id).filter(|member| member.connected);
        member.map(|member| member.last_heard = now).is_some()
    }

    pub(super) fn is_connected(&self, id: AggregatorId) -> bool {
        self.members.get(&id).is_some_and(|member| member.connected)
    }

    fn connected(&self) -> impl Iterator<Item = (AggregatorId, &Aggregator)> {
        self.members.iter().filter(|(_, member)| member.connected).map(|(id, member)| (*id, member))
    }

    /// The aggregators that are connected and were not heard for so long.
    pub(super) fn silent(&self, now: Time, grace: Duration, standstill: &Standstill) -> Vec<AggregatorId> {
        let is_silent = |member: &Aggregator| standstill.deadline(member.last_heard, grace) <= now;
        self.connected().filter(|(_, member)| is_silent(member)).map(|(id, _)| id).collect()
    }

    /// When [`Aggregators::silent`] is to be asked.
    pub(super) fn next_deadline(&self, grace: Duration, standstill: &Standstill) -> Option<Time> {
        self.connected().map(|(_, member)| standstill.deadline(member.last_heard, grace)).min()
    }

    pub(super) fn last_heard_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.members.values_mut().map(|member| &mut member.last_heard)
    }

    /// Sets the addresses at which workers reach an aggregator.
    pub(super) fn register(&mut self, id: AggregatorId, addresses: &Addresses) {
        if let Some(member) = self.members.get_mut(&id) {
            member.address = addresses.to_string();
        }
    }

    pub(super) fn take_report(&mut self, id: AggregatorId, report: AggregatorReport) {
        if let Some(member) = self.members.get_mut(&id) {
            member.report = report;
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AggregatorId> + '_ {
        self.members.keys().copied()
    }

    /// The plan is sent to an aggregator. Whether it was not sent on this connection before.
    pub(super) fn inform(&mut self, id: AggregatorId) -> bool {
        self.members.get_mut(&id).is_some_and(|member| !std::mem::replace(&mut member.informed, true))
    }

    /// An aggregator has missed something of the plan.
    pub(super) fn forget_informed(&mut self, id: AggregatorId) {
        if let Some(member) = self.members.get_mut(&id) {
            member.informed = false;
        }
    }

    /// Aggregators that have the plan, and need to hear of changes to it.
    pub(super) fn informed(&self) -> impl Iterator<Item = AggregatorId> + '_ {
        self.members.iter().filter(|(_, member)| member.informed).map(|(id, _)| *id)
    }

    pub(super) fn statuses(&self) -> Vec<AggregatorStatus> {
        let status = |(&aggregator, member): (&AggregatorId, &Aggregator)| AggregatorStatus {
            aggregator,
            address: member.address.clone(),
            connected: member.connected,
            report: member.report.clone(),
        };
        self.members.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: AggregatorId = AggregatorId(0);

    fn id(welcome: Welcome) -> u32 {
        let NodeId::Aggregator(id) = welcome.you else { panic!("{welcome:?}") };
        id.0
    }

    #[test]
    fn each_process_has_a_number_of_its_own_and_keeps_it() {
        let mut aggregators = Aggregators::default();
        let wanted = Some(AggregatorId(5));
        assert_eq!(id(aggregators.accept(Time::ZERO, ProcessId(7), None).unwrap()), 0);
        assert_eq!(id(aggregators.accept(Time::ZERO, ProcessId(8), wanted).unwrap()), 5);
        assert_eq!(id(aggregators.accept(Time::ZERO, ProcessId(9), None).unwrap()), 1);
        assert!(
            aggregators
                .accept(Time::ZERO, ProcessId(7), None)
                .unwrap_err()
                .reason
                .contains("aggregator 0 is here already")
        );
        aggregators.lose(FIRST, true);
        assert_eq!(
            id(aggregators.accept(Time::ZERO, ProcessId(7), wanted).unwrap()),
            0,
            "it is known by its process"
        );
        assert_eq!(aggregators.ids().map(|id| id.0).collect::<Vec<_>>(), [0, 1, 5]);
    }

    #[test]
    fn the_number_of_another_process_is_free_when_that_is_gone() {
        let mut aggregators = Aggregators::default();
        aggregators.accept(Time::ZERO, ProcessId(7), None).unwrap();
        aggregators.take_report(FIRST, AggregatorReport { workers: 3, ..AggregatorReport::default() });
        let refusal = aggregators.accept(Time::ZERO, ProcessId(8), Some(FIRST)).unwrap_err();
        assert!(refusal.retry && refusal.reason.contains("another process"), "{refusal:?}");
        aggregators.lose(FIRST, true);
        assert_eq!(id(aggregators.accept(Time::ZERO, ProcessId(8), Some(FIRST)).unwrap()), 0);
        assert_eq!(aggregators.statuses()[0].report.workers, 0, "nothing is known of it yet");
        let most = AggregatorId(limits::MAX_AGGREGATORS);
        assert!(!aggregators.accept(Time::ZERO, ProcessId(9), Some(most)).unwrap_err().retry);
        assert!(aggregators.accept(Time::ZERO, ProcessId(9), Some(AggregatorId(most.0 - 1))).is_ok());
    }

    #[test]
    fn the_status_has_its_address_its_words_and_whether_it_is_here() {
        let mut aggregators = Aggregators::default();
        aggregators.accept(Time::ZERO, ProcessId(7), None).unwrap();
        aggregators.register(FIRST, &"rack:7070".into());
        aggregators.take_report(FIRST, AggregatorReport { workers: 3, ..AggregatorReport::default() });
        let status = &aggregators.statuses()[0];
        assert_eq!(
            (status.address.as_str(), status.connected, status.report.workers),
            ("rack:7070", true, 3)
        );
        aggregators.lose(FIRST, true);
        assert!(!aggregators.statuses()[0].connected);
    }

    #[test]
    fn the_plan_is_told_once_on_each_connection() {
        let mut aggregators = Aggregators::default();
        aggregators.accept(Time::ZERO, ProcessId(7), None).unwrap();
        assert!(
            aggregators.inform(FIRST) && !aggregators.inform(FIRST) && !aggregators.inform(AggregatorId(9))
        );
        assert_eq!(aggregators.informed().collect::<Vec<_>>(), [FIRST]);
        aggregators.forget_informed(FIRST);
        assert!(aggregators.informed().next().is_none() && aggregators.inform(FIRST));
        aggregators.lose(FIRST, true);
        aggregators.accept(Time::ZERO, ProcessId(7), None).unwrap();
        assert!(aggregators.informed().next().is_none());
    }
}
