//! Which process serves which shard, and which keeps a copy of it: fail-over, copies, and moves that balance the load.
//!
//! Data cores that serve no shard are *spare*. One is told to keep a copy of a shard; when the serving process says that the copy is in
//! sync, the copy can take over ([`crate::replica`]). That makes a backup of it, or ends a move.

use crate::address::Addresses;
use crate::limits;
use crate::prng::Prng;
use crate::status::ServedStatus;
use crate::types::{NodeId, ProcessId, ServerId, ShardId, Time};
use crate::wire::{Change, Plan, ServedShard, Welcome};
use std::collections::{BTreeMap, BTreeSet};

/// The spare cores of a job, and what they are used for.
#[derive(Debug, Default)]
pub(super) struct Replication {
    /// Whether every shard is to have a copy.
    keeps_copies: bool,
    spares: BTreeMap<u32, Spare>,
    /// Server processes that were ever here, by their numbers.
    numbers: BTreeMap<ServerId, ProcessId>,
    /// Processes that were asked for another core, which has not come yet.
    starting: BTreeMap<ProcessId, Time>,
    /// Servers that are to serve nothing any more.
    draining: BTreeSet<ServerId>,
    /// Processes of servers that were drained. Cores of them that are yet to come are told to end.
    left: BTreeSet<ProcessId>,
}

#[derive(Debug)]
struct Spare {
    process: ProcessId,
    core: u32,
    addresses: Option<Addresses>,
    /// Since when it is not connected, if it is not.
    lost_since: Option<Time>,
    keeps: Option<Kept>,
}

/// A copy that a spare core keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    shard: ShardId,
    is_in_sync: bool,
    /// It is to serve the shard when it is in sync.
    is_move: bool,
}

/// The process that serves a shard, as the coordinator sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Primary {
    /// Since when it is out of reach, if it is.
    pub(super) lost_since: Option<Time>,
    /// When it was heard last.
    pub(super) last_heard: Time,
}

/// Something that is to be done.
#[derive(Debug, PartialEq)]
pub(super) enum Order {
    /// A spare core is to keep a copy of a shard.
    Keep {
        /// The core.
        spare: u32,
        /// The shard, and who serves it.
        served: ServedShard,
    },
    /// The process of a node is to start another core.
    Start(NodeId),
    /// The plan changes; nobody takes over.
    Change(Change),
    /// A copy takes over a shard.
    Promote {
        /// The core.
        spare: u32,
        /// The shard.
        shard: ShardId,
        /// The change of the plan.
        change: Change,
        /// Why, for the log.
        why: String,
    },
}

/// How long a process may take to start another core.
const START_PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

impl Replication {
    pub(super) fn new(keeps_copies: bool) -> Replication {
        Replication { keeps_copies, ..Replication::default() }
    }

    /// A core comes that serves no shard.
    pub(super) fn accept(&mut self, process: ProcessId, server: Option<ServerId>, core: u32) -> Welcome {
        // The same after a restart of the coordinator: copies are known by it to the processes that serve their shards.
        let wanted = Prng::fork(process.0, u64::from(core)).next_u64() as u32;
        let is_free = |number: &u32| {
            self.spares.get(number).is_none_or(|spare| (spare.process, spare.core) == (process, core))
        };
        let number = (0..).map(|more| wanted.wrapping_add(more)).find(is_free).unwrap_or(wanted);
        if !self.left.contains(&process) {
            self.number(process, server);
        }
        self.starting.remove(&process);
        let spare = self.spares.entry(number).or_insert(Spare {
            process,
            core,
            addresses: None,
            lost_since: None,
            keeps: None,
        });
        // What it kept is not known: it may be another life of the core. It is told again.
        (spare.lost_since, spare.keeps) = (None, None);
        Welcome { you: NodeId::Spare(number), incarnation: process.0, session: 0 }
    }

    /// The number of a server process: the one that it wants, if that is nobody's, or another.
    pub(super) fn number(&mut self, process: ProcessId, wanted: Option<ServerId>) -> ServerId {
        if let Some((number, _)) = self.numbers.iter().find(|(_, known)| **known == process) {
            return *number;
        }
        let is_free = |number: &ServerId| {
            self.numbers
                .get(number)
                .is_none_or(|known| !self.spares.values().any(|spare| spare.process == *known))
        };
        let number = wanted
            .filter(is_free)
            .or_else(|| (0..).map(ServerId).find(|number| !self.numbers.contains_key(number)))
            .unwrap_or(ServerId(0));
        self.numbers.insert(number, process);
        number
    }

    /// The servers that a job begins with.
    pub(super) fn begin(&mut self, plan: &Plan) {
        self.numbers.extend(plan.shards.iter().map(|served| (served.shard.server, served.process)));
    }

    pub(super) fn register(&mut self, number: u32, addresses: Addresses) {
        if let Some(spare) = self.spares.get_mut(&number) {
            spare.addresses = Some(addresses);
        }
    }

    /// A core that has come back says what it keeps: a copy that can take over still can, since nobody was told otherwise.
    pub(super) fn note_kept(&mut self, number: u32, shard: ShardId, plan: &Plan) {
        if let Some(spare) = self.spares.get_mut(&number)
            && let Some(served) = plan.served(shard).filter(|served| served.copy == Some(spare.process))
        {
            spare.keeps = Some(Kept { shard: served.shard, is_in_sync: true, is_move: false });
        }
    }

    pub(super) fn lose(&mut self, now: Time, number: u32) {
        if let Some(spare) = self.spares.get_mut(&number) {
            spare.lost_since = Some(now);
        }
    }

    /// Since when each is away.
    pub(super) fn silences_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.spares.values_mut().filter_map(|spare| spare.lost_since.as_mut())
    }

    pub(super) fn is_known(&self, number: u32) -> bool {
        self.spares.contains_key(&number)
    }

    /// Cores that are here.
    pub(super) fn connected(&self) -> impl Iterator<Item = u32> + '_ {
        self.spares.iter().filter(|(_, spare)| spare.lost_since.is_none()).map(|(number, _)| *number)
    }

    /// A server is to serve nothing any more. The error says why that cannot be.
    pub(super) fn drain(&mut self, server: ServerId, plan: &Plan) -> Result<String, String> {
        let Some(process) = self.numbers.get(&server) else {
            return Err(format!("there is no {server}; `paramill status` lists the job's servers"));
        };
        let others = self.numbers.values().filter(|other| *other != process);
        let can_take = |other: &&ProcessId| {
            self.spares.values().any(|spare| spare.process == **other && spare.lost_since.is_none())
                || plan.shards.iter().any(|served| served.process == **other)
        };
        if others.filter(can_take).count() == 0 {
            return Err(format!(
                "{server} is the only one; start another with `paramill serve --join` first"
            ));
        }
        let shards = plan.shards.iter().filter(|served| served.process == *process).count();
        self.draining.insert(server);
        Ok(format!("{server} is drained: {shards} shards move away from it"))
    }

    /// The serving process says that a copy is in sync, as of an epoch. The plan's change, if it is to be a backup.
    pub(super) fn note_in_sync(
        &mut self,
        plan: &Plan,
        shard: ShardId,
        process: ProcessId,
        epoch: u32,
    ) -> Option<Change> {
        let served = plan.served(shard)?;
        // The serving process does not wait for a copy that it knew before the shard's last change.
        if served.since > epoch {
            return None;
        }
        let keeps = |spare: &&mut Spare| {
            spare.process == process && spare.keeps.is_some_and(|kept| kept.shard == shard)
        };
        let kept = self.spares.values_mut().find(keeps)?.keeps.as_mut()?;
        kept.is_in_sync = true;
        if kept.is_move {
            return None;
        }
        Some(ServedShard { copy: Some(process), ..served.clone() }.change())
    }

    /// The serving process says that a copy is out of reach. It is told in any case that it need not wait.
    pub(super) fn note_lost(&mut self, plan: &Plan, shard: ShardId, process: ProcessId) -> Option<Change> {
        self.give_up(shard, |spare| spare.process == process);
        let served = plan.served(shard)?;
        let copy = served.copy.filter(|copy| *copy != process);
        Some(ServedShard { copy, ..served.clone() }.change())
    }

    fn give_up(&mut self, shard: ShardId, is_meant: impl Fn(&Spare) -> bool) {
        let spares = self.spares.values_mut().filter(|spare| is_meant(spare));
        spares.for_each(|spare| spare.keeps = spare.keeps.filter(|kept| kept.shard != shard));
    }

    /// The next thing to do.
    pub(super) fn poll(
        &mut self,
        now: Time,
        plan: &Plan,
        primary: impl Fn(ShardId) -> Primary,
    ) -> Option<Order> {
        if let Some(order) = self.poll_lost(now, plan) {
            return Some(order);
        }
        let is_gone = |served: &ServedShard| {
            let Primary { lost_since, last_heard } = primary(served.shard);
            lost_since.is_some_and(|since| since + limits::COPY_GRACE <= now)
                || last_heard + limits::FAILOVER_SILENCE <= now
        };
        if let Some(order) = self.poll_failover(plan, is_gone) {
            return Some(order);
        }
        if let Some(order) = self.poll_handover(plan) {
            return Some(order);
        }
        let is_here = |served: &ServedShard| primary(served.shard).lost_since.is_none();
        if let Some(order) = self.poll_unkept(plan, is_here) {
            return Some(order);
        }
        self.starting.retain(|_, since| *since + START_PATIENCE > now);
        self.poll_copy(now, plan, is_here).or_else(|| self.poll_move(now, plan, is_here))
    }

    /// Spare cores that do not come back.
    fn poll_lost(&mut self, now: Time, plan: &Plan) -> Option<Order> {
        let is_lost = |spare: &Spare| spare.lost_since.is_some_and(|since| since + limits::COPY_GRACE <= now);
        while let Some(number) = self.spares.iter().find(|(_, spare)| is_lost(spare)).map(|(id, _)| *id) {
            let spare = self.spares.remove(&number)?;
            let served = spare.keeps.and_then(|kept| plan.served(kept.shard));
            if let Some(served) = served.filter(|served| served.copy == Some(spare.process)) {
                return Some(Order::Change(ServedShard { copy: None, ..served.clone() }.change()));
            }
        }
        None
    }

    /// A shard whose process is gone is served by its copy.
    fn poll_failover(&mut self, plan: &Plan, is_gone: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        for served in plan.shards.iter().filter(|served| served.copy.is_some() && is_gone(served)) {
            let is_copy = |spare: &Spare| {
                let keeps = spare.keeps.is_some_and(|kept| kept.shard == served.shard && kept.is_in_sync);
                keeps && Some(spare.process) == served.copy && spare.lost_since.is_none()
            };
            if let Some((number, _)) = self.spares.iter().find(|(_, spare)| is_copy(spare)) {
                let why = format!("{} is out of reach", served.process);
                return self.promote(*number, served.shard, why);
            }
        }
        None
    }

    /// A copy that is to serve its shard is in sync.
    fn poll_handover(&mut self, plan: &Plan) -> Option<Order> {
        let is_ready = |spare: &Spare| {
            let ready = |kept: Kept| kept.is_move && kept.is_in_sync && plan.served(kept.shard).is_some();
            spare.lost_since.is_none() && spare.keeps.is_some_and(ready)
        };
        let (number, shard) = self.spares.iter().find_map(|(number, spare)| {
            spare.keeps.filter(|_| is_ready(spare)).map(|kept| (*number, kept.shard))
        })?;
        self.promote(number, shard, "it moves".into())
    }

    fn promote(&mut self, number: u32, shard: ShardId, why: String) -> Option<Order> {
        let spare = self.spares.remove(&number)?;
        self.give_up(shard, |_| true);
        let addresses = spare.addresses?;
        let change = Change::Served { shard, process: spare.process, addresses, copy: None };
        Some(Order::Promote { spare: number, shard, change, why })
    }

    /// A server that is drained has a copy which nobody else can keep: it is given up.
    fn poll_unkept(&mut self, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        let draining = |served: &&ServedShard| served.copy.is_some_and(|copy| self.is_draining(copy));
        plan.shards.iter().find(draining)?;
        let loads = self.loads(plan, is_here);
        let has_others = |served: &ServedShard| loads.keys().any(|process| *process != served.process);
        let is_stuck = |served: &&ServedShard| loads.contains_key(&served.process) && !has_others(served);
        let served = plan.shards.iter().filter(draining).find(is_stuck)?;
        self.give_up(served.shard, |spare| Some(spare.process) == served.copy);
        Some(Order::Change(ServedShard { copy: None, ..served.clone() }.change()))
    }

    /// A shard without a copy is copied. One that is kept by a server which is drained does not count.
    fn poll_copy(&mut self, now: Time, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        if !self.keeps_copies {
            return None;
        }
        let is_kept = |shard: ShardId| {
            let keeps = |spare: &&Spare| spare.keeps.is_some_and(|kept| kept.shard == shard);
            self.spares.values().filter(keeps).any(|spare| !self.is_draining(spare.process))
        };
        let lacking = plan.shards.iter().filter(|served| !is_kept(served.shard) && is_here(served));
        let lacking: Vec<ServedShard> = lacking.cloned().collect();
        for served in lacking {
            let loads = self.loads(plan, &is_here);
            let others = loads.into_iter().filter(|(process, _)| *process != served.process);
            let mut others: Vec<(ProcessId, usize)> =
                others.map(|(process, load)| (process, load.serves + load.copies)).collect();
            others.sort_by_key(|(process, load)| (*load, *process));
            for (process, _) in others {
                if let Some(order) = self.keep_at(now, plan, process, &served, false) {
                    return Some(order);
                }
            }
        }
        None
    }

    /// A shard moves from the server that serves most to the one that serves least, or away from one that is drained.
    fn poll_move(&mut self, now: Time, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        let is_moving = |spare: &Spare| spare.keeps.is_some_and(|kept| kept.is_move);
        if self.spares.values().any(is_moving) || !plan.shards.iter().all(&is_here) {
            return None;
        }
        // A copy that is being made may be the one that takes over.
        if self.spares.values().any(|spare| spare.keeps.is_some_and(|kept| !kept.is_in_sync)) {
            return None;
        }
        let loads = self.loads(plan, &is_here);
        let drained =
            plan.shards.iter().map(|served| served.process).find(|process| self.is_draining(*process));
        let least = loads.iter().min_by_key(|(process, load)| (load.serves, **process))?;
        let most = loads.iter().max_by_key(|(process, load)| (load.serves, **process))?;
        let (from, to) = match drained {
            Some(process) => (process, *least.0),
            None if most.1.serves >= least.1.serves + 2 => (*most.0, *least.0),
            None => return None,
        };
        let movable = || plan.shards.iter().filter(|served| served.process == from && served.process != to);
        // A copy that is there already need not be made.
        let has_copy = |served: &&ServedShard| served.copy == Some(to);
        let served = movable().find(has_copy).or_else(|| movable().next())?.clone();
        let copy = self.spares.values_mut().find(|spare| {
            let keeps = spare.keeps.is_some_and(|kept| kept.shard == served.shard && kept.is_in_sync);
            spare.process == to && keeps && spare.lost_since.is_none()
        });
        if let Some(kept) = copy.and_then(|spare| spare.keeps.as_mut()) {
            kept.is_move = true;
            return self.poll_handover(plan);
        }
        self.keep_at(now, plan, to, &served, true)
    }

    /// Has a process keep a copy of a shard, or start a core that could.
    fn keep_at(
        &mut self,
        now: Time,
        plan: &Plan,
        process: ProcessId,
        served: &ServedShard,
        is_move: bool,
    ) -> Option<Order> {
        let own =
            || self.spares.iter().filter(|(_, spare)| spare.process == process && spare.lost_since.is_none());
        let free = own().find(|(_, spare)| spare.keeps.is_none() && spare.addresses.is_some());
        if let Some(number) = free.map(|(number, _)| *number) {
            let kept = Kept { shard: served.shard, is_in_sync: false, is_move };
            self.spares.get_mut(&number)?.keeps = Some(kept);
            return Some(Order::Keep { spare: number, served: served.clone() });
        }
        if self.starting.contains_key(&process) {
            return None;
        }
        let spare = own().next().map(|(number, _)| NodeId::Spare(*number));
        let shard = plan.shards.iter().find(|served| served.process == process);
        let node = spare.or(shard.map(|served| NodeId::Shard(served.shard)))?;
        self.starting.insert(process, now);
        Some(Order::Start(node))
    }

    /// Whether a process is to serve nothing, or was.
    fn is_draining(&self, process: ProcessId) -> bool {
        self.left.contains(&process)
            || self.draining.iter().any(|server| self.numbers.get(server) == Some(&process))
    }

    /// What each server that is here and not drained does.
    fn loads(&self, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> BTreeMap<ProcessId, Load> {
        let mut loads = BTreeMap::<ProcessId, Load>::new();
        for served in plan.shards.iter().filter(|served| is_here(served)) {
            loads.entry(served.process).or_default().serves += 1;
        }
        for spare in self.spares.values().filter(|spare| spare.lost_since.is_none()) {
            loads.entry(spare.process).or_default().copies += usize::from(spare.keeps.is_some());
        }
        loads.retain(|process, _| !self.is_draining(*process));
        loads
    }

    /// A server that was drained and serves nothing any more: it may end.
    pub(super) fn poll_drained(&mut self, plan: &Plan) -> Option<ServerId> {
        let serves = |server: &ServerId| {
            let process = self.numbers.get(server);
            plan.shards
                .iter()
                .any(|served| Some(&served.process) == process || served.copy.as_ref() == process)
        };
        let server = *self.draining.iter().find(|server| !serves(server))?;
        self.draining.remove(&server);
        self.left.extend(self.numbers.remove(&server));
        Some(server)
    }

    /// A spare core of a server that was drained. The core that served the last shard there comes after that has moved.
    pub(super) fn poll_leaving(&mut self) -> Option<u32> {
        let is_leaving = |spare: &Spare| spare.lost_since.is_none() && self.left.contains(&spare.process);
        let number = *self.spares.iter().find(|(_, spare)| is_leaving(spare))?.0;
        self.spares.remove(&number);
        Some(number)
    }

    /// Where every shard is served, and which server keeps its copy.
    pub(super) fn statuses(&self, plan: &Plan) -> Vec<ServedStatus> {
        let number = |process: ProcessId| {
            self.numbers.iter().find(|(_, known)| **known == process).map(|(number, _)| *number)
        };
        let status = |served: &ServedShard| {
            let copying = self
                .spares
                .values()
                .find(|spare| spare.keeps.is_some_and(|kept| kept.shard == served.shard && !kept.is_in_sync));
            ServedStatus {
                shard: served.shard,
                server: number(served.process),
                copy: served.copy.and_then(number),
                copying: copying.and_then(|spare| number(spare.process)),
            }
        };
        plan.shards.iter().map(status).collect()
    }

    /// When [`Replication::poll`] is to be asked though nothing happened.
    pub(super) fn next_timeout(&self, plan: &Plan, primary: impl Fn(ShardId) -> Primary) -> Option<Time> {
        let spares = self.spares.values().filter_map(|spare| spare.lost_since);
        let can_take_over = |served: &&ServedShard| {
            let is_copy = |spare: &Spare| {
                let keeps = spare.keeps.is_some_and(|kept| kept.shard == served.shard && kept.is_in_sync);
                keeps && Some(spare.process) == served.copy && spare.lost_since.is_none()
            };
            self.spares.values().any(is_copy)
        };
        let shards = plan.shards.iter().filter(can_take_over).flat_map(|served| {
            let Primary { lost_since, last_heard } = primary(served.shard);
            let lost = lost_since.map(|since| since + limits::COPY_GRACE);
            [lost, Some(last_heard + limits::FAILOVER_SILENCE)]
        });
        let starting = self.starting.values().map(|since| *since + START_PATIENCE);
        spares.map(|since| since + limits::COPY_GRACE).chain(shards.flatten()).chain(starting).min()
    }
}

/// What a server does.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    serves: usize,
    copies: usize,
}
