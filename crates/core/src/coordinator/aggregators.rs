//! Aggregators: who they are and where. The job goes on whether they are here or not; workers that were told to go
//! through one wait for it themselves.

use crate::address::Addresses;
use crate::limits;
use crate::status::{AggregatorReport, AggregatorStatus};
use crate::types::{AggregatorId, NodeId, ProcessId};
use crate::wire::{Refusal, Welcome};
use std::collections::BTreeMap;

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
    /// The plan was sent on this connection.
    informed: bool,
    report: AggregatorReport,
}

impl Aggregators {
    pub(super) fn accept(
        &mut self,
        process: ProcessId,
        wanted: Option<AggregatorId>,
        is_planned: bool,
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
            Some(member) if member.process != process => {
                let reason = format!("{id} is another process already; give each its own number, or none");
                return Err(Refusal { reason, retry: !is_planned });
            }
            Some(member) if member.connected => {
                return Err(Refusal { reason: format!("{id} is here already"), retry: true });
            }
            _ => {}
        }
        let fresh = || Aggregator {
            process,
            address: String::new(),
            connected: true,
            informed: false,
            report: AggregatorReport::default(),
        };
        let member = self.members.entry(id).or_insert_with(fresh);
        member.connected = true;
        member.informed = false;
        Ok(Welcome { you: NodeId::Aggregator(id), incarnation: process.0 })
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
