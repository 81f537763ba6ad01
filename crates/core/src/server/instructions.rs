//! What the coordinator says: the plan, who is there, and policies that change.

use super::Shard;
use super::table_shard::TableShard;
use super::tables::Tables;
use crate::consistency::SyncPolicy;
use crate::optimizer::OptimizerPolicy;
use crate::prng::Prng;
use crate::role::Output;
use crate::table::glob_matches;
use crate::types::{ServerId, TableId, Time, WorkerId};
use crate::wire::Plan;
use crate::wire::control::{self, Control};
use std::collections::BTreeSet;

impl Shard {
    pub(super) fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(*plan),
            Control::Members { workers, .. } => self.take_members(now, &workers),
            Control::SetSync { table, server, sync } => self.set_sync(now, &table, server, &sync),
            Control::SetOptimizer { table, server, optimizer } => {
                self.set_optimizer(&table, server, &optimizer);
            }
            Control::ReportRequest => self.send_report(now),
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => {
                let line = format!("ignored a `{}` message from the coordinator", other.name());
                self.outputs.push_back(Output::Log(line));
            }
        }
    }

    fn take_plan(&mut self, plan: Plan) {
        let Some(id) = self.id() else { return };
        if self.plan.is_some() {
            // Sent again after a broken connection; the first one stands.
            return self.tell_coordinator(&Control::Ready);
        }
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.fail(error);
        }
        let chunks = plan.chunks();
        let workers = || plan.live_members().map(|member| member.worker);
        plan.live_members().for_each(|member| self.members.insert(member.worker, member.incarnation));
        let mut tables = Vec::with_capacity(plan.tables.len());
        for (number, (spec, chunks)) in plan.tables.iter().zip(&chunks).enumerate() {
            let own =
                (0u32..).zip(chunks).filter(|(_, chunk)| chunk.shard == id).map(|(n, chunk)| (n, *chunk));
            let policy = plan.policy_of(TableId(number as u32), id.server);
            let label = u64::from(id.server.0) << 40 | u64::from(id.core) << 32 | number as u64;
            let seed = Prng::fork(plan.seed, label).next_u64();
            match TableShard::new(&self.registry, spec.clone(), policy, own, workers(), seed) {
                Ok(table) => tables.push(table),
                Err(error) => {
                    let error = format!("table `{}`: {error}", spec.name);
                    return self.fail(error);
                }
            }
        }
        self.tables = Tables::new(tables);
        self.delivery.enter_epoch(plan.epoch);
        self.plan = Some(plan);
        self.tell_coordinator(&Control::Ready);
    }

    fn take_members(&mut self, now: Time, alive: &[WorkerId]) {
        let alive: BTreeSet<WorkerId> = alive.iter().copied().collect();
        let gone: Vec<WorkerId> = self.members.iter().filter(|worker| !alive.contains(worker)).collect();
        for worker in &gone {
            self.members.remove(*worker);
            self.delivery.remove_worker(*worker);
            self.tables.iter_mut().for_each(|table| table.remove_worker(*worker));
        }
        if !gone.is_empty() {
            (0..self.tables.len()).for_each(|table| self.tables.settle(now, table, &mut self.delivery));
        }
        let waiting = self.tables.iter().find(|part| part.elements() > 0 && !part.is_initialised());
        let waiting = waiting.map(|part| part.spec().name.clone());
        if gone.contains(&WorkerId::FIRST)
            && let Some(table) = waiting
        {
            let error = Some(format!(
                "worker 0 was gone before the initial values of table `{table}` were here; start the job anew"
            ));
            self.tell_coordinator(&Control::Stop { error });
        }
    }

    fn set_sync(&mut self, now: Time, glob: &str, server: Option<ServerId>, sync: &str) {
        if server.is_some_and(|server| Some(server) != self.config.server) {
            return;
        }
        for table in 0..self.tables.len() {
            if !glob_matches(glob, &self.tables.get(table).spec().name) {
                continue;
            }
            match SyncPolicy::parse(&self.registry.consistency, sync) {
                // It may be told again after a broken connection; that is no switch.
                Ok(policy) if policy.to_string() == self.tables.get(table).sync().to_string() => {}
                Ok(policy) => {
                    self.tables.set_sync(now, table, policy);
                    // Chunks may be stepped once more in the same round.
                    self.delivery.restart(table);
                    self.tables.settle(now, table, &mut self.delivery);
                }
                Err(error) => {
                    return self.outputs.push_back(Output::Log(control::sentence(error.to_string())));
                }
            }
        }
        self.send_report(now);
    }

    fn set_optimizer(&mut self, glob: &str, server: Option<ServerId>, text: &str) {
        if server.is_some_and(|server| Some(server) != self.config.server) {
            return;
        }
        for part in self.tables.iter_mut().filter(|part| glob_matches(glob, &part.spec().name)) {
            let outcome = OptimizerPolicy::parse(&self.registry.optimizer, text);
            if !outcome.is_ok_and(|optimizer| part.set_optimizer(optimizer)) {
                let line =
                    format!("ignored an optimizer that table `{}` cannot take over to", part.spec().name);
                self.outputs.push_back(Output::Log(line));
            }
        }
    }
}
