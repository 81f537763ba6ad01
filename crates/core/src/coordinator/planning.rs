//! From declarations to a plan that everybody follows.

use super::Coordinator;
use super::config;
use super::gate::Gate;
use super::members::Member;
use crate::limits;
use crate::policy::{Axis, Policy, PolicyOverride};
use crate::role::Output;
use crate::spec::{Spec, SpecError};
use crate::status::MemberState;
use crate::table::{TableSpec, glob_matches};
use crate::types::{NodeId, ServerId, ShardId, TableId, Time, WorkerId};
use crate::wire::control::{self, frame};
use crate::wire::{self, Cause, Control, Fault, Kind, Plan};
use std::collections::BTreeSet;

impl Coordinator {
    /// A worker's tables. Those of the first to declare some are what the others' are compared with.
    pub(super) fn declare(&mut self, now: Time, worker: WorkerId, tables: Vec<TableSpec>) {
        if self.plan.is_some() {
            // Its plan got lost with a connection.
            return if self.started {
                self.send_plan(NodeId::Worker(worker));
            };
        }
        if let Err(message) = self.check_declaration(worker, &tables) {
            let fault = Fault { cause: Cause::Declaration, message };
            self.outputs
                .push_back(Output::Send { to: NodeId::Worker(worker), frame: frame(Kind::Error, &fault) });
            return;
        }
        if let Some(member) = self.workers.get_mut(&worker) {
            member.declared = true;
        }
        self.tables = tables;
        self.try_plan(now);
    }

    fn check_declaration(&self, worker: WorkerId, tables: &[TableSpec]) -> Result<(), String> {
        if tables.is_empty() || tables.len() > limits::MAX_TABLES {
            return Err(format!(
                "{worker} declared {} tables; expected 1 to {}",
                tables.len(),
                limits::MAX_TABLES
            ));
        }
        if let Some(other) = self.workers.iter().find(|(id, member)| **id != worker && member.declared) {
            return self.compare_declaration(worker, tables, *other.0);
        }
        let mut names = BTreeSet::new();
        for table in tables {
            table.check()?;
            if !names.insert(&table.name) {
                return Err(format!("{worker} declared table `{}` twice", table.name));
            }
            let own = PolicyOverride::new("*", table.policy.clone());
            let fits = self.config.check_rule(&self.registry, &own);
            fits.map_err(|error| format!("table `{}`: {error}", table.name))?;
        }
        self.config.check_tables(&self.registry, tables).map_err(|error| error.to_string())
    }

    fn compare_declaration(
        &self,
        worker: WorkerId,
        tables: &[TableSpec],
        other: WorkerId,
    ) -> Result<(), String> {
        let theirs = &self.tables;
        if theirs.len() != tables.len() {
            return Err(format!("{worker} declared {} tables, {other} {}", tables.len(), theirs.len()));
        }
        match tables.iter().zip(theirs).find(|(mine, theirs)| mine != theirs) {
            Some((mine, theirs)) => {
                mine.check()?;
                Err(format!(
                    "{worker} declared table `{}` of shape {:?}, {other} declared `{}` of shape {:?} in its place; \
                     all workers must declare the same tables in the same order",
                    mine.name, mine.shape, theirs.name, theirs.shape
                ))
            }
            None => Ok(()),
        }
    }

    /// Makes the plan once everybody is here, and gives it to the shards first.
    pub(super) fn try_plan(&mut self, now: Time) {
        let workers_here = self.workers.len() == self.config.workers as usize
            && self.workers.values().all(|member| member.connected && member.declared);
        if self.plan.is_some() || !workers_here || self.complete_servers() < self.config.servers as usize {
            return;
        }
        let plan = self.make_plan();
        let message = Control::Plan(Box::new(plan.clone()));
        let fits = match control::fits(&frame(Kind::Control, &message)) {
            true => plan.check(),
            false => Err(format!(
                "{} tables on {} servers make more than a message of {} bytes can say: use fewer tables, or a \
                 placement that keeps them whole",
                plan.tables.len(),
                self.config.servers,
                limits::MAX_CONTROL_BYTES
            )),
        };
        if let Err(why) = fits {
            return self.end(Some(format!("the job cannot be planned: {why}")));
        }
        let sync = plan.policy_of(TableId(0), ServerId(0)).sync(&self.registry);
        let sync = sync.expect("checked before the job started");
        if !sync.overlap {
            self.gate = Some(Gate::new(sync, self.workers.keys().copied(), plan.seed));
        }
        self.epoch = 1;
        self.plan = Some(plan);
        for member in self.workers.values_mut() {
            member.last_progress = now;
        }
        let shards: Vec<ShardId> = self.shards.keys().copied().collect();
        shards.into_iter().for_each(|id| self.send_plan(NodeId::Shard(id)));
        let aggregators: Vec<NodeId> = self.aggregators.keys().map(|id| NodeId::Aggregator(*id)).collect();
        aggregators.into_iter().for_each(|to| self.send_plan(to));
    }

    fn make_plan(&self) -> Plan {
        let placement = Spec::parse(self.config.policy.get(Axis::Placement))
            .and_then(|spec| self.registry.placement.build(&spec))
            .expect("checked before the job started");
        let sizes: Vec<_> = self.tables.iter().map(TableSpec::size).collect();
        let addresses =
            |id: &ShardId| self.shards[id].addresses.clone().expect("a complete server is registered");
        Plan {
            epoch: 1,
            parts: placement.place(&sizes, self.config.servers),
            tables: self.tables.clone(),
            shards: self.shards.keys().map(|id| (*id, addresses(id))).collect(),
            members: self
                .workers
                .iter()
                .map(|(id, member)| wire::Member::original(*id, member.incarnation))
                .collect(),
            policy: self.config.policy.clone(),
            overrides: self.config.overrides.clone(),
            switches: Vec::new(),
            seed: self.config.seed,
        }
    }

    /// Sends the plan, once on each connection.
    pub(super) fn send_plan(&mut self, to: NodeId) {
        let has_plan = match to {
            NodeId::Worker(id) => self.workers.get_mut(&id).map(|member| &mut member.has_plan),
            NodeId::Shard(id) => self.shards.get_mut(&id).map(|shard| &mut shard.has_plan),
            NodeId::Aggregator(id) => self.aggregators.get_mut(&id).map(|member| &mut member.has_plan),
            NodeId::Coordinator | NodeId::Admin(_) | NodeId::Through(..) => None,
        };
        if let (Some(plan), Some(has_plan @ false)) = (&self.plan, has_plan) {
            *has_plan = true;
            let message = Control::Plan(Box::new(plan.clone()));
            self.send(to, &message);
        }
    }

    /// A shard has the plan in place. After a broken connection it also hears what it may have missed.
    pub(super) fn take_ready(&mut self, id: ShardId) {
        let (Some(_), Some(shard)) = (&self.plan, self.shards.get_mut(&id)) else { return };
        shard.ready = true;
        if self.epoch > 1 {
            let members = self.members();
            self.send(NodeId::Shard(id), &members);
        }
        self.repeat_switches(NodeId::Shard(id));
        if !self.started && self.shards.values().all(|shard| shard.ready) {
            self.start();
        }
    }

    fn start(&mut self) {
        self.started = true;
        for member in self.workers.values_mut().filter(|member| member.state == MemberState::Joining) {
            member.state = MemberState::Running;
        }
        let workers: Vec<WorkerId> = self.live().collect();
        workers.into_iter().for_each(|id| self.send_plan(NodeId::Worker(id)));
    }

    /// Changes policies, for those who are here and for those who come back. Returns the sentence that says what was done.
    pub(super) fn set(&mut self, now: Time, rule: PolicyOverride) -> Result<String, String> {
        let Some(plan) = &self.plan else {
            return Err(format!("the job has not started ({})", self.phase()));
        };
        let sentence = self.check_set(plan, &rule)?;
        let messages = switch(&rule);
        let first = self.config.overrides.len();
        let Some(plan) = &mut self.plan else { return Err("the job has not started".into()) };
        let mut switches = plan.overrides.split_off(first);
        switches.retain(|known| !known.is_replaced_by(&rule));
        plan.overrides.extend(switches);
        plan.overrides.push(rule);
        let first_sync = plan.policy_of(TableId(0), ServerId(0)).sync(&self.registry);
        if let (Some(gate), Ok(policy)) = (&mut self.gate, first_sync) {
            gate.set_policy(now, policy);
        }
        self.open_gate();
        for message in messages {
            self.tell_shards(&message);
            if matches!(message, Control::SetSync { .. }) {
                self.tell_aggregators(&message);
                self.tell_workers(&message);
            }
        }
        Ok(sentence)
    }

    /// Whether policies can be changed so while the job runs; the sentence that says what it does.
    fn check_set(&self, plan: &Plan, rule: &PolicyOverride) -> Result<String, String> {
        let text = |error: SpecError| error.to_string();
        let fixed = |(axis, _): (Axis, &str)| Some((axis, axis.info().fixed?));
        if let Some((axis, why)) = rule.policies.iter().find_map(fixed) {
            return Err(format!("`{axis}` cannot be changed while a job runs: {why}"));
        }
        if rule.policies.is_empty() {
            return Err("no policy is named".into());
        }
        if plan.overrides.len() >= limits::MAX_OVERRIDES {
            return Err(format!("there are {} exceptions already; repeat one of them", plan.overrides.len()));
        }
        if let Some(server) = rule.server.filter(|server| server.0 >= self.config.servers) {
            let last = self.config.servers - 1;
            return Err(format!("there is no {server}; the job has servers 0 to {last}"));
        }
        rule.check().map_err(text)?;
        rule.policies.check(&self.registry).map_err(text)?;
        let is_meant = |table: &&TableSpec| glob_matches(&rule.table, &table.name);
        let matched = plan.tables.iter().filter(is_meant).count();
        if matched == 0 {
            return Err(format!(
                "no table matches `{}`; the job has {}",
                rule.table,
                config::names(&plan.tables)
            ));
        }
        let overrides: Vec<PolicyOverride> = plan.overrides.iter().chain([rule]).cloned().collect();
        for (number, table) in (0..).map(TableId).zip(&plan.tables).filter(|(_, table)| is_meant(table)) {
            let server = rule.server.unwrap_or(ServerId(0));
            let (old, new) =
                (plan.policy_of(number, server), table.policy_on(server, &plan.policy, &overrides));
            self.check_switch(number, table, &new)?;
            if !new
                .optimizer(&self.registry)
                .map_err(text)?
                .can_follow(&old.optimizer(&self.registry).map_err(text)?)
            {
                return Err(format!(
                    "table `{}` is stepped by {}: its parameters can be changed while it runs, but not the rule, nor whether \
                     gradients are clipped",
                    table.name,
                    old.get(Axis::Optimizer)
                ));
            }
            let (registry, servers) = (&self.registry, self.config.servers);
            config::check_table(registry, (&plan.tables, table), servers, &plan.policy, &overrides)
                .map_err(text)?;
        }
        let place = rule.server.map_or("all servers".into(), |server| server.to_string());
        Ok(format!("{matched} tables now have {} on {place}", rule.policies))
    }

    /// Whether a table can go over to a consistency model.
    fn check_switch(&self, number: TableId, table: &TableSpec, policy: &Policy) -> Result<(), String> {
        let sync = policy.sync(&self.registry).map_err(|error| error.to_string())?;
        if sync.overlap != self.gate.is_none() {
            return Err("`overlap` is fixed when the job starts".into());
        }
        let lends =
            |(_, member): &(&WorkerId, &Member)| member.is_live() && member.report.slabs.contains(&number);
        match self.workers.iter().find(lends) {
            Some((worker, _)) if sync.partial_pull().is_some() => Err(format!(
                "table `{}` is exchanged as a slab by {worker}, and such exchanges wait for all blocks: `{sync}` needs \
                 `push_pull`; switch to psp without b and tau2",
                table.name
            )),
            _ => Ok(()),
        }
    }

    /// Tells who was away which models were switched since the job began.
    pub(super) fn repeat_switches(&mut self, to: NodeId) {
        let overrides = self.plan.iter().flat_map(|plan| &plan.overrides);
        let switches: Vec<Control> = overrides.skip(self.config.overrides.len()).flat_map(switch).collect();
        switches.iter().for_each(|message| self.send(to, message));
    }
}

/// A change as others are told of it.
fn switch(rule: &PolicyOverride) -> Vec<Control> {
    let told = |(axis, text): (Axis, &str)| {
        let (table, server, text) = (rule.table.clone(), rule.server, text.to_owned());
        match axis {
            Axis::Sync => Some(Control::SetSync { table, server, sync: text }),
            Axis::Optimizer => Some(Control::SetOptimizer { table, server, optimizer: text }),
            _ => None,
        }
    };
    rule.policies.iter().filter_map(told).collect()
}
