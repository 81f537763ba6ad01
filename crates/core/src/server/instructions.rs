//! What the coordinator says: the plan, and how it changes.

use super::Shard;
use super::table_shard::TableShard;
use super::tables::Tables;
use crate::prng::Prng;
use crate::role::Output;
use crate::types::{NodeId, TableId, Time, WorkerId};
use crate::wire::control::{self, Control};
use crate::wire::{Change, FirstClock, Member, Plan, Standing};

impl Shard {
    pub(super) fn handle_control(&mut self, now: Time, message: Control) {
        match message {
            Control::Plan(plan) => self.take_plan(now, *plan),
            Control::Change { epoch, change } => self.take_change(now, epoch, &change),
            Control::ReportRequest => self.send_report(now),
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => self.log(format!("ignored a `{}` message from the coordinator", other.name())),
        }
    }

    /// The whole plan: the first one, or one that may tell of changes that were lost with a connection.
    fn take_plan(&mut self, now: Time, plan: Plan) {
        if let Err(why) = plan.check() {
            let error =
                format!("the coordinator's plan cannot be used: {why}; use the same release everywhere");
            return self.fail(error);
        }
        match &self.plan {
            Some(known) => {
                for (epoch, change) in known.changes_to(&plan) {
                    self.apply_change(now, epoch, &change);
                }
            }
            None => {
                if let Err(error) = self.begin(now, plan) {
                    return self.fail(error);
                }
            }
        }
        self.tell_entered();
    }

    /// Sets up the tables of the first plan that this shard gets.
    fn begin(&mut self, now: Time, plan: Plan) -> Result<(), String> {
        let Some(id) = self.id() else { return Ok(()) };
        let chunks = plan.chunks();
        let originals = || plan.live_members().filter(|member| member.standing == Standing::From(0));
        originals().for_each(|member| self.members.insert(member.worker, member.incarnation));
        let mut tables = Vec::with_capacity(plan.tables.len());
        for (number, (spec, chunks)) in plan.tables.iter().zip(&chunks).enumerate() {
            let own =
                (0u32..).zip(chunks).filter(|(_, chunk)| chunk.shard == id).map(|(n, chunk)| (n, *chunk));
            let policy = plan.policy_of(TableId(number as u32), id.server);
            let label = u64::from(id.server.0) << 40 | u64::from(id.core) << 32 | number as u64;
            let seed = Prng::fork(plan.seed, label).next_u64();
            let workers = originals().map(|member| member.worker);
            let part = TableShard::new(&self.registry, spec.clone(), policy, own, workers, seed)
                .map_err(|error| format!("table `{}`: {error}", spec.name))?;
            tables.push(part);
        }
        self.tables = Tables::new(tables);
        self.delivery.enter_epoch(plan.epoch);
        self.valid_from =
            (0..plan.tables.len() as u32).map(|table| plan.valid_from(TableId(table))).collect();
        // Workers may have joined before this shard was there.
        let later: Vec<Member> =
            plan.live_members().filter(|member| member.standing != Standing::From(0)).copied().collect();
        self.plan = Some(plan);
        for Member { worker, incarnation, standing, .. } in later {
            self.add_worker(worker, incarnation);
            if let Standing::From(clock) = standing {
                self.set_first_clock(now, worker, clock);
            }
        }
        Ok(())
    }

    fn take_change(&mut self, now: Time, epoch: u32, change: &Change) {
        let Some(plan) = &self.plan else { return self.tell_coordinator(&Control::PlanQuery) };
        if epoch > plan.epoch + 1 {
            // A change in between is missing.
            return self.tell_coordinator(&Control::PlanQuery);
        }
        if let Err(why) = plan.check_change(change) {
            return self.fail(format!("the coordinator's change of the plan cannot be used: {why}"));
        }
        if epoch > plan.epoch {
            self.apply_change(now, epoch, change);
        }
        self.tell_entered();
    }

    /// The one way from an epoch to the next.
    fn apply_change(&mut self, now: Time, epoch: u32, change: &Change) {
        let (Some(id), Some(plan)) = (self.id(), &mut self.plan) else { return };
        plan.apply(epoch, change);
        self.delivery.enter_epoch(epoch);
        match change {
            Change::Joining { worker, incarnation } => {
                self.add_worker(*worker, *incarnation);
                // A connection of its predecessor is not its own.
                self.outputs.push_back(Output::Disconnect { peer: NodeId::Worker(*worker) });
            }
            Change::Joined { worker, clock } => self.set_first_clock(now, *worker, *clock),
            Change::Left { worker } => self.remove_worker(*worker),
            Change::Policy(rule) => {
                for table in 0..self.tables.len() {
                    if rule.is_for(&self.tables.get(table).spec().name, id.server) {
                        self.set_policy(now, table);
                    }
                }
                self.send_report(now);
            }
        }
        // Whoever comes or goes may be what a round waited for.
        self.settle_all(now);
    }

    fn tell_entered(&mut self) {
        let Some(plan) = &self.plan else { return };
        let joining = plan.live_members().filter(|member| member.standing == Standing::Joining);
        let first = |member: &Member| FirstClock {
            worker: member.worker,
            incarnation: member.incarnation,
            clock: self.first_clock(member.worker),
        };
        let joining = joining.map(first).collect();
        let has_first = plan.member(WorkerId::FIRST).is_some_and(Member::is_live);
        let lacks_values = if has_first { None } else { self.tables.without_values() };
        let entered = Control::Entered { epoch: plan.epoch, joining, lacks_values };
        self.tell_coordinator(&entered);
    }

    /// No round after the open one of each table closes without the worker from now on.
    fn add_worker(&mut self, worker: WorkerId, incarnation: u64) {
        self.members.join(worker, incarnation);
        self.tables.iter_mut().for_each(|table| table.join(worker));
    }

    fn settle_all(&mut self, now: Time) {
        (0..self.tables.len()).for_each(|table| self.tables.settle(now, table, &mut self.delivery));
    }

    /// The first clock that a worker which joined could push to all tables here.
    fn first_clock(&self, worker: WorkerId) -> u64 {
        let tables = self.tables.iter().filter(|table| table.elements() > 0);
        let first = |table: &TableShard| table.first_clock(worker);
        tables.filter_map(first).max().unwrap_or(0)
    }

    fn set_first_clock(&mut self, now: Time, worker: WorkerId, clock: u64) {
        self.tables.iter_mut().for_each(|table| table.set_first_clock(worker, clock));
        self.settle_all(now);
    }

    fn remove_worker(&mut self, worker: WorkerId) {
        self.members.remove(worker);
        self.delivery.remove_worker(worker);
        self.tables.iter_mut().for_each(|table| table.remove_worker(worker));
        if worker == WorkerId::FIRST {
            // Its successor sends them all: they are not to be a mixture.
            self.tables.iter_mut().for_each(TableShard::forget_incomplete_values);
        }
    }

    /// Lets the policies of a table that the plan names hold from now on.
    fn set_policy(&mut self, now: Time, table: usize) {
        let (Some(plan), Some(id)) = (&self.plan, self.id()) else { return };
        let number = TableId(table as u32);
        let policy = plan.policy_of(number, id.server);
        self.valid_from[table] = plan.valid_from(number);
        match policy.sync(&self.registry) {
            Ok(sync) if sync.to_string() == self.tables.get(table).sync().to_string() => {}
            Ok(sync) => {
                self.tables.set_sync(now, table, sync);
                // Chunks may be stepped once more in the same round.
                self.delivery.restart(table);
            }
            Err(error) => self.log(control::sentence(error.to_string())),
        }
        let optimizer = policy.optimizer(&self.registry);
        let part = self.tables.get_mut(table);
        if !optimizer.is_ok_and(|optimizer| part.set_optimizer(optimizer)) {
            let line = format!("ignored an optimizer that table `{}` cannot take over to", part.spec().name);
            self.log(line);
        }
    }
}
