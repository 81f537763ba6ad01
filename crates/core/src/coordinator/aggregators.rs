//! Aggregators: who they are and where. The job goes on whether they are here or not; workers that were told to go
//! through one wait for it themselves.

use super::Coordinator;
use crate::limits;
use crate::role::Lost;
use crate::status::{AggregatorReport, AggregatorStatus};
use crate::types::{AggregatorId, NodeId};
use crate::wire::{Control, Refusal, Welcome};

/// What the coordinator knows of an aggregator.
#[derive(Debug)]
pub(super) struct AggregatorMember {
    process: u64,
    address: String,
    connected: bool,
    /// The plan was sent on this connection.
    pub(super) has_plan: bool,
    report: AggregatorReport,
}

impl Coordinator {
    pub(super) fn accept_aggregator(
        &mut self,
        process: u64,
        wanted: Option<AggregatorId>,
    ) -> Result<Welcome, Refusal> {
        let known = self.aggregators.iter().find(|(_, member)| member.process == process).map(|(id, _)| *id);
        let free =
            || (0..limits::MAX_AGGREGATORS).map(AggregatorId).find(|id| !self.aggregators.contains_key(id));
        let id = known.or(wanted).or_else(free).filter(|id| id.0 < limits::MAX_AGGREGATORS);
        let Some(id) = id else {
            let reason = format!("a job has aggregators 0 to {}", limits::MAX_AGGREGATORS - 1);
            return Err(Refusal { reason, retry: false });
        };
        match self.aggregators.get_mut(&id) {
            Some(member) if member.process != process => {
                let reason = format!("{id} is another process already; give each its own number, or none");
                return Err(Refusal { reason, retry: self.plan.is_none() });
            }
            Some(member) if member.connected => {
                return Err(Refusal { reason: format!("{id} is here already"), retry: true });
            }
            Some(member) => {
                member.connected = true;
                member.has_plan = false;
            }
            None => {
                let member = AggregatorMember {
                    process,
                    address: String::new(),
                    connected: true,
                    has_plan: false,
                    report: AggregatorReport::default(),
                };
                self.aggregators.insert(id, member);
            }
        }
        Ok(Welcome { you: NodeId::Aggregator(id), incarnation: process })
    }

    pub(super) fn handle_aggregator(&mut self, id: AggregatorId, message: Control) {
        match message {
            Control::Register { addresses } => match addresses.check() {
                Ok(()) => {
                    if let Some(member) = self.aggregators.get_mut(&id) {
                        member.address = addresses.to_string();
                    }
                    self.brief_aggregator(id);
                }
                Err(why) => self.log(format!("{id} gave {why}")),
            },
            Control::AggregatorReport(report) => {
                if let Some(member) = self.aggregators.get_mut(&id) {
                    member.report = report;
                }
            }
            other => self.log(format!("ignored a `{}` message from {id}", other.name())),
        }
    }

    /// Says everything that an aggregator may have missed.
    fn brief_aggregator(&mut self, id: AggregatorId) {
        let to = NodeId::Aggregator(id);
        self.send_plan(to);
        if self.epoch > 1 {
            let members = self.members();
            self.send(to, &members);
        }
        self.repeat_switches(to);
    }

    pub(super) fn lose_aggregator(&mut self, id: AggregatorId, why: &Lost) {
        if self.plan.is_none() {
            self.aggregators.remove(&id);
        } else if let Some(member) = self.aggregators.get_mut(&id) {
            member.connected = false;
            if !self.over {
                self.log(format!("lost {id}: {why}"));
            }
        }
    }

    pub(super) fn aggregator_statuses(&self) -> Vec<AggregatorStatus> {
        let status = |(&aggregator, member): (&AggregatorId, &AggregatorMember)| AggregatorStatus {
            aggregator,
            address: member.address.clone(),
            connected: member.connected,
            report: member.report.clone(),
        };
        self.aggregators.iter().map(status).collect()
    }

    pub(super) fn tell_aggregators(&mut self, message: &Control) {
        let aggregators: Vec<NodeId> = self.aggregators.keys().map(|id| NodeId::Aggregator(*id)).collect();
        aggregators.into_iter().for_each(|to| self.send(to, message));
    }
}
