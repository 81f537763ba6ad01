//! Which process serves which shard, and which keeps a copy of it: fail-over, copies, and moves that balance the load.
//!
//! Data cores that serve no shard are *spare*. One is told to keep a copy of a shard; when the serving process says that the copy is in
//! sync, the copy can take over ([`crate::replica`]). That makes a backup of it, or ends a move.

use super::balance::Balance;
use crate::address::Addresses;
use crate::limits;
use crate::prng::Prng;
use crate::status::{MovesStatus, ServedStatus};
use crate::types::{CopyId, NodeId, ProcessId, ServerId, ShardId, Time};
use crate::wire::{Change, Plan, ServedShard, Welcome};
use serde::{Deserialize, Serialize};
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
    /// Copies that processes have of the shards that they served, until when they may come and say so.
    formers: BTreeMap<ShardId, (CopyId, Time)>,
    /// Servers that are to serve nothing any more.
    draining: BTreeSet<ServerId>,
    /// Processes of servers that were drained. Cores of them that are yet to come are told to end.
    left: BTreeSet<ProcessId>,
    /// Processes that made no progress.
    shunned: BTreeSet<ProcessId>,
    /// No copy is made before, after a restart of the coordinator: those that exist come back by then.
    copies_from: Option<Time>,
    /// Which shards are to move.
    balance: Balance,
    /// Shards that have moved, and the bytes that were sent for it.
    moved: (u64, u64),
    /// How often the coordinator was started anew, and the orders for copies that it gave since: no two have the same number.
    lives: u32,
    orders: u32,
}

/// What a coordinator that is started anew has to know of the servers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct ServersState {
    lives: u32,
    numbers: Vec<(ServerId, ProcessId)>,
    draining: Vec<ServerId>,
    left: Vec<ProcessId>,
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

impl Spare {
    /// Whether it has a copy that the plan says can take over.
    fn can_take_over(&self, served: &ServedShard) -> bool {
        let kept = self.keeps.filter(|kept| kept.shard == served.shard && kept.is_in_sync);
        let is_here = self.lost_since.is_none() && self.addresses.is_some();
        is_here && kept.is_some_and(|kept| served.copy == Some(self.copy_id(kept)))
    }

    fn copy_id(&self, kept: Kept) -> CopyId {
        CopyId { process: self.process, order: kept.order }
    }

    /// Whether this is the copy that it keeps of a shard.
    fn has_copy(&self, shard: ShardId, copy: CopyId) -> bool {
        self.keeps.is_some_and(|kept| kept.shard == shard && self.copy_id(kept) == copy)
    }
}

/// A copy that a spare core keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    shard: ShardId,
    /// The number of the order to keep it.
    order: u64,
    is_in_sync: bool,
    /// It is to serve the shard when it is in sync.
    is_move: bool,
    /// Bytes that were sent to move it, once it is in sync.
    bytes: u64,
}

/// A serving process says that a copy is in sync.
#[derive(Debug, Clone, Copy)]
pub(super) struct InSync {
    pub(super) shard: ShardId,
    pub(super) copy: CopyId,
    /// The newest epoch that the serving process knew.
    pub(super) epoch: u32,
    /// Bytes that were sent to the copy.
    pub(super) bytes: u64,
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
        /// The number of this order.
        order: u64,
        /// The core is to serve the shard as soon as it has everything.
        moves: bool,
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
    /// A copy that the plan gives its shard to has not heard of it: the message was lost with a connection, or with the coordinator.
    PromoteAgain(u32),
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
        // What it keeps it says before it says where it is reached. Until then it is of no use.
        (spare.lost_since, spare.keeps, spare.addresses) = (None, None, None);
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
        self.balance.begin(plan);
    }

    /// A shard has carried so many bytes since the job began.
    pub(super) fn note_traffic(&mut self, now: Time, shard: ShardId, bytes: u64) {
        self.balance.note_traffic(now, shard, bytes);
    }

    /// The process of a shard that has a copy makes no progress: from now on it is given nothing, and what it has moves away. Whether there is a copy.
    pub(super) fn shun(&mut self, plan: &Plan, shard: ShardId) -> bool {
        let served = plan.served(shard).filter(|served| served.copy.is_some());
        self.shunned.extend(served.map(|served| served.process));
        served.is_some()
    }

    /// What has to be known when the coordinator is started anew. Processes that have nothing are not remembered.
    pub(super) fn remembered(&self, plan: Option<&Plan>) -> ServersState {
        let served = plan.iter().flat_map(|plan| &plan.shards);
        let in_plan: BTreeSet<ProcessId> = served
            .flat_map(|served| [Some(served.process), served.copy.map(|copy| copy.process)])
            .flatten()
            .collect();
        let is_used = |process: &ProcessId| {
            in_plan.contains(process) || self.spares.values().any(|spare| spare.process == *process)
        };
        let numbers = self.numbers.iter().filter(|(_, process)| is_used(process));
        ServersState {
            lives: self.lives,
            numbers: numbers.map(|(number, process)| (*number, *process)).collect(),
            draining: self.draining.iter().copied().collect(),
            left: self.left.iter().copied().collect(),
        }
    }

    /// Goes on from what was remembered.
    pub(super) fn restore(&mut self, state: ServersState) {
        let ServersState { lives, numbers, draining, left } = state;
        (self.lives, self.orders) = (lives.saturating_add(1), 0);
        self.numbers.extend(numbers);
        self.draining.extend(draining);
        self.left.extend(left);
    }

    /// The coordinator was started anew.
    pub(super) fn postpone_copies(&mut self, until: Time) {
        self.copies_from = Some(until);
    }

    pub(super) fn register(&mut self, number: u32, addresses: Addresses) {
        if let Some(spare) = self.spares.get_mut(&number) {
            spare.addresses = Some(addresses);
        }
    }

    /// A core that has come back says what it keeps: a copy that can take over still can, since nobody was told otherwise. One that was to take
    /// over may not know it.
    pub(super) fn note_kept(&mut self, number: u32, shard: ShardId, order: u64, plan: &Plan) {
        self.formers.remove(&shard);
        if let Some(spare) = self.spares.get_mut(&number)
            && let Some(served) = plan.served(shard)
            && (served.copy == Some(CopyId { process: spare.process, order })
                || served.process == spare.process)
        {
            spare.keeps =
                Some(Kept { shard: served.shard, order, is_in_sync: true, is_move: false, bytes: 0 });
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

    /// Spare cores that are not connected now and may come back.
    pub(super) fn away(&self) -> impl Iterator<Item = NodeId> + '_ {
        let away = self.spares.iter().filter(|(_, spare)| spare.lost_since.is_some());
        away.map(|(number, _)| NodeId::Spare(*number))
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
    pub(super) fn note_in_sync(&mut self, plan: &Plan, found: InSync) -> Option<Change> {
        let InSync { shard, copy, epoch, bytes } = found;
        let served = plan.served(shard)?;
        // The serving process does not wait for a copy that it knew before the shard's last change.
        if served.since > epoch {
            return None;
        }
        let kept = self.spares.values_mut().find(|spare| spare.has_copy(shard, copy))?.keeps.as_mut()?;
        kept.is_in_sync = true;
        kept.bytes = if kept.is_move { bytes } else { 0 };
        // Told again what the plan says: a change would cost the shard the other copies that it makes.
        if kept.is_move || served.copy == Some(copy) {
            return None;
        }
        Some(ServedShard { copy: Some(copy), ..served.clone() }.change())
    }

    /// The serving process says that a copy is out of reach. It is told in any case that it need not wait.
    pub(super) fn note_lost(&mut self, plan: &Plan, shard: ShardId, lost: CopyId) -> Option<Change> {
        self.give_up(shard, |spare| spare.has_copy(shard, lost));
        let served = plan.served(shard)?;
        let copy = served.copy.filter(|copy| *copy != lost);
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
        self.copies_from = self.copies_from.filter(|from| *from > now);
        if let Some(order) = self.poll_lost(now, plan) {
            return Some(order);
        }
        let is_gone = |served: &ServedShard| {
            let Primary { lost_since, last_heard } = primary(served.shard);
            lost_since.is_some_and(|since| since + limits::COPY_GRACE <= now)
                || last_heard + limits::FAILOVER_SILENCE <= now
        };
        let is_here = |served: &ServedShard| primary(served.shard).lost_since.is_none();
        if let Some(order) = self.poll_unheard(plan, is_here).or_else(|| self.poll_failover(plan, is_gone)) {
            return Some(order);
        }
        if let Some(order) = self.poll_handover(now, plan, is_here) {
            return Some(order);
        }
        if self.copies_from.is_some() {
            return None;
        }
        if let Some(order) = self.poll_unkept(plan, is_here) {
            return Some(order);
        }
        self.starting.retain(|_, since| *since + START_PATIENCE > now);
        self.poll_copy(now, plan, is_here).or_else(|| self.poll_move(now, plan, is_here))
    }

    /// Spare cores that do not come back. The plan does not name a copy that nobody keeps: another is only made then.
    fn poll_lost(&mut self, now: Time, plan: &Plan) -> Option<Order> {
        let is_lost = |spare: &Spare| spare.lost_since.is_some_and(|since| since + limits::COPY_GRACE <= now);
        while let Some(number) = self.spares.iter().find(|(_, spare)| is_lost(spare)).map(|(id, _)| *id) {
            self.spares.remove(&number)?;
        }
        if self.copies_from.is_some() {
            return None;
        }
        self.formers.retain(|_, (_, until)| *until > now);
        // A core that has come back has yet to say what it keeps.
        let may_be_kept = |served: &ServedShard, copy: CopyId| {
            let is_it = |spare: &Spare| {
                let is_silent = spare.process == copy.process && spare.addresses.is_none();
                is_silent || spare.has_copy(served.shard, copy)
            };
            let is_awaited = self.formers.get(&served.shard).is_some_and(|(former, _)| *former == copy);
            is_awaited || self.spares.values().any(is_it)
        };
        let is_gone = |served: &&ServedShard| served.copy.is_some_and(|copy| !may_be_kept(served, copy));
        let served = plan.shards.iter().find(is_gone)?;
        Some(Order::Change(ServedShard { copy: None, ..served.clone() }.change()))
    }

    /// A core keeps the shard that it is to serve. What other cores of its process still keep of that shard, at other addresses, is no copy.
    fn poll_unheard(&mut self, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        let mut unheard = None;
        for (number, spare) in self.spares.iter_mut().filter(|(_, spare)| spare.lost_since.is_none()) {
            let served = spare.keeps.and_then(|kept| plan.served(kept.shard));
            if let (Some(served), Some(addresses)) = (served, &spare.addresses)
                && served.process == spare.process
            {
                spare.keeps = None;
                unheard = unheard.or((served.addresses == *addresses && !is_here(served)).then_some(*number));
            }
        }
        let number = unheard?;
        self.spares.remove(&number);
        Some(Order::PromoteAgain(number))
    }

    /// A shard whose process is gone is served by its copy.
    fn poll_failover(&mut self, plan: &Plan, is_gone: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        for served in plan.shards.iter().filter(|served| is_gone(served)) {
            if let Some((number, _)) = self.spares.iter().find(|(_, spare)| spare.can_take_over(served)) {
                let why = format!("{} is out of reach", served.process);
                return self.promote(*number, served.shard, None, why);
            }
        }
        None
    }

    /// A copy that is to serve its shard is in sync.
    fn poll_handover(
        &mut self,
        now: Time,
        plan: &Plan,
        is_here: impl Fn(&ServedShard) -> bool,
    ) -> Option<Order> {
        let is_ready = |spare: &Spare| {
            let ready = |kept: Kept| kept.is_move && kept.is_in_sync && plan.served(kept.shard).is_some();
            spare.lost_since.is_none() && spare.addresses.is_some() && spare.keeps.is_some_and(ready)
        };
        let (number, kept) = self.spares.iter().find_map(|(number, spare)| {
            spare.keeps.filter(|_| is_ready(spare)).map(|kept| (*number, kept))
        })?;
        // The process that has served it until now has everything too. It remains the copy at least until there is another.
        let served = plan.served(kept.shard).filter(|served| self.keeps_copies && is_here(served));
        let former = served.map(|served| CopyId { process: served.process, order: self.number_order() });
        self.formers.extend(former.map(|copy| (kept.shard, (copy, now + limits::COPY_GRACE))));
        let order = self.promote(number, kept.shard, former, "it moves".into())?;
        let (shards, bytes) = self.moved;
        self.moved = (shards + 1, bytes + kept.bytes);
        self.balance.note_moved(now, kept.shard);
        Some(order)
    }

    /// The number of an order for a copy.
    fn number_order(&mut self) -> u64 {
        self.orders += 1;
        u64::from(self.lives) << 32 | u64::from(self.orders)
    }

    fn promote(&mut self, number: u32, shard: ShardId, copy: Option<CopyId>, why: String) -> Option<Order> {
        let addresses = self.spares.get(&number)?.addresses.clone()?;
        let spare = self.spares.remove(&number)?;
        self.give_up(shard, |_| true);
        let change = Change::Served { shard, process: spare.process, addresses, copy };
        Some(Order::Promote { spare: number, shard, change, why })
    }

    /// A server that is drained has a copy which nobody else can keep: it is given up.
    fn poll_unkept(&mut self, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        let draining = |served: &&ServedShard| served.copy.is_some_and(|copy| self.is_draining(copy.process));
        plan.shards.iter().find(draining)?;
        let loads = self.loads(plan, is_here);
        let has_others = |served: &ServedShard| loads.keys().any(|process| *process != served.process);
        let is_stuck = |served: &&ServedShard| loads.contains_key(&served.process) && !has_others(served);
        let served = plan.shards.iter().filter(draining).find(is_stuck)?;
        self.give_up(served.shard, |spare| {
            served.copy.is_some_and(|copy| spare.has_copy(served.shard, copy))
        });
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
        let has_none = |served: &ServedShard| served.copy.is_none_or(|copy| self.is_draining(copy.process));
        let is_lacking =
            |served: &&ServedShard| has_none(served) && !is_kept(served.shard) && is_here(served);
        let lacking = plan.shards.iter().filter(is_lacking);
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

    /// A shard moves to where it is wanted, for the balance or because its server is drained.
    fn poll_move(&mut self, now: Time, plan: &Plan, is_here: impl Fn(&ServedShard) -> bool) -> Option<Order> {
        let is_moving = |spare: &Spare| spare.keeps.is_some_and(|kept| kept.is_move);
        if self.spares.values().any(is_moving) || !plan.shards.iter().all(&is_here) {
            return None;
        }
        // A copy that is being made may be the one that takes over.
        if self.spares.values().any(|spare| spare.keeps.is_some_and(|kept| !kept.is_in_sync)) {
            return None;
        }
        let servers = self.loads(plan, &is_here).into_keys().collect();
        let (served, to) = self.balance.next(plan, &servers)?;
        let copy = self.spares.values_mut().find(|spare| {
            let keeps = spare.keeps.is_some_and(|kept| kept.shard == served.shard && kept.is_in_sync);
            spare.process == to && keeps && spare.lost_since.is_none()
        });
        if let Some(kept) = copy.and_then(|spare| spare.keeps.as_mut()) {
            kept.is_move = true;
            return self.poll_handover(now, plan, is_here);
        }
        self.keep_at(now, plan, to, &served, true)
    }

    /// Shards are to be spread over the servers anew, by what they carry. The error says why that cannot be.
    pub(super) fn rebalance(
        &mut self,
        plan: &Plan,
        primary: impl Fn(ShardId) -> Primary,
    ) -> Result<String, String> {
        let is_here = |served: &ServedShard| primary(served.shard).lost_since.is_none();
        if let Some(served) = plan.shards.iter().find(|served| !is_here(served)) {
            return Err(format!("{} is out of reach at the moment; try again", served.shard));
        }
        let servers: BTreeSet<ProcessId> = self.loads(plan, is_here).into_keys().collect();
        if servers.len() < 2 {
            return Err("there is only one server; start another with `paramill serve --join` first".into());
        }
        Ok(match self.balance.ask(plan, &servers) {
            (0, _) => {
                format!("no shard moves: the load of {} servers is as even as it can be", servers.len())
            }
            (1, bytes) => format!("one shard moves, of {bytes} bytes of parameters"),
            (shards, bytes) => {
                format!("{shards} shards move, one after the other, of {bytes} bytes of parameters")
            }
        })
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
            let order = self.number_order();
            let kept = Kept { shard: served.shard, order, is_in_sync: false, is_move, bytes: 0 };
            self.spares.get_mut(&number)?.keeps = Some(kept);
            return Some(Order::Keep { spare: number, served: served.clone(), order, moves: is_move });
        }
        // One that has yet to say where it is reached need not be asked for.
        if self.starting.contains_key(&process) || own().any(|(_, spare)| spare.addresses.is_none()) {
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
            || self.shunned.contains(&process)
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
            let keeps = |served: &ServedShard| served.copy.is_some_and(|copy| Some(&copy.process) == process);
            plan.shards.iter().any(|served| Some(&served.process) == process || keeps(served))
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

    /// Where every shard is served, and which server keeps its copy, as far as these are here.
    pub(super) fn statuses(&self, plan: &Plan, primary: impl Fn(ShardId) -> Primary) -> Vec<ServedStatus> {
        let number = |process: ProcessId| {
            self.numbers.iter().find(|(_, known)| **known == process).map(|(number, _)| *number)
        };
        let status = |served: &ServedShard| {
            let copying = self
                .spares
                .values()
                .find(|spare| spare.keeps.is_some_and(|kept| kept.shard == served.shard && !kept.is_in_sync));
            let copy = self.spares.values().find(|spare| spare.can_take_over(served));
            let is_here = primary(served.shard).lost_since.is_none();
            ServedStatus {
                shard: served.shard,
                server: number(served.process).filter(|_| is_here),
                copy: copy.and_then(|spare| number(spare.process)),
                copying: copying.and_then(|spare| number(spare.process)),
                moving: self.balance.wanted(served.shard).and_then(number),
            }
        };
        plan.shards.iter().map(status).collect()
    }

    /// Shards that have moved, and those that are to.
    pub(super) fn moves(&self) -> MovesStatus {
        let is_moving = |spare: &&Spare| spare.keeps.is_some_and(|kept| kept.is_move);
        let (shards, bytes) = self.moved;
        MovesStatus {
            shards,
            bytes,
            planned: self.balance.wanted_count() as u32,
            under_way: self.spares.values().filter(is_moving).count() as u32,
        }
    }

    /// When [`Replication::poll`] is to be asked though nothing happened.
    pub(super) fn next_timeout(&self, plan: &Plan, primary: impl Fn(ShardId) -> Primary) -> Option<Time> {
        let spares = self.spares.values().filter_map(|spare| spare.lost_since);
        let can_take_over =
            |served: &&ServedShard| self.spares.values().any(|spare| spare.can_take_over(served));
        let shards = plan.shards.iter().filter(can_take_over).flat_map(|served| {
            let Primary { lost_since, last_heard } = primary(served.shard);
            let lost = lost_since.map(|since| since + limits::COPY_GRACE);
            [lost, Some(last_heard + limits::FAILOVER_SILENCE)]
        });
        let starting = self.starting.values().map(|since| *since + START_PATIENCE);
        let lost = spares.map(|since| since + limits::COPY_GRACE);
        let formers = self.formers.values().map(|(_, until)| *until);
        lost.chain(shards.flatten()).chain(starting).chain(formers).chain(self.copies_from).min()
    }
}

/// What a server does.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    serves: usize,
    copies: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    const SHARD: ShardId = ShardId { server: ServerId(0), core: 0 };
    const SERVING: ProcessId = ProcessId(1);
    const OTHER: ProcessId = ProcessId(2);

    fn plan() -> Plan {
        Plan {
            epoch: Plan::FIRST_EPOCH,
            tables: vec![],
            parts: vec![],
            whole: vec![],
            shards: vec![ServedShard::original(SHARD, SERVING, "host:1".into())],
            workers: 0,
            members: vec![],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        }
    }

    fn is_here(_: ShardId) -> Primary {
        Primary { lost_since: None, last_heard: Time::ZERO }
    }

    /// A spare core of the other process comes, and is told to keep a copy: its number and the order's.
    fn ordered(replication: &mut Replication, plan: &Plan) -> (u32, u64) {
        let NodeId::Spare(number) = replication.accept(OTHER, Some(ServerId(1)), 0).you else {
            panic!("it serves nothing")
        };
        assert_eq!(replication.poll(Time::ZERO, plan, is_here), None, "it may say that it keeps a copy");
        replication.register(number, "host:2".into());
        match replication.poll(Time::ZERO, plan, is_here) {
            Some(Order::Keep { spare, order, .. }) if spare == number => (spare, order),
            other => panic!("a copy is to be made: {other:?}"),
        }
    }

    #[test]
    fn what_is_said_of_a_copy_that_an_earlier_coordinator_ordered_does_not_count_for_another() {
        let mut plan = plan();
        let mut before = Replication::new(true);
        before.begin(&plan);
        let (_, first) = ordered(&mut before, &plan);
        let mut replication = Replication::new(true);
        replication.restore(before.remembered(Some(&plan)));
        let (number, second) = ordered(&mut replication, &plan);
        assert!(second > first);
        let copy = |order: u64| CopyId { process: OTHER, order };
        let in_sync =
            |order: u64, plan: &Plan| InSync { shard: SHARD, copy: copy(order), epoch: plan.epoch, bytes: 1 };
        // The serving process knew the first copy, which its core has dropped since.
        assert_eq!(replication.note_in_sync(&plan, in_sync(first, &plan)), None);
        replication.note_kept(number, SHARD, first, &plan);
        let change = replication.note_in_sync(&plan, in_sync(second, &plan));
        let Some(change @ Change::Served { copy: kept, .. }) = change else { panic!("it can take over") };
        assert_eq!(kept, Some(copy(second)));
        plan.apply(2, &change);
        let statuses = replication.statuses(&plan, is_here);
        assert_eq!((statuses[0].server, statuses[0].copy), (Some(ServerId(0)), Some(ServerId(1))));
        assert_eq!(replication.poll(Time::ZERO, &plan, is_here), None);
        // It does not cost the second copy that the first one is lost.
        let lost = replication.note_lost(&plan, SHARD, copy(first));
        assert!(matches!(lost, Some(Change::Served { copy: kept, .. }) if kept == Some(copy(second))));
    }

    #[test]
    fn a_copy_that_nobody_keeps_is_not_counted_on_before_another_is_made() {
        let mut plan = plan();
        let copy = Some(CopyId { process: OTHER, order: 1 });
        plan.apply(2, &ServedShard { copy, ..plan.shards[0].clone() }.change());
        let mut replication = Replication::new(true);
        replication.begin(&plan);
        assert_eq!(replication.statuses(&plan, is_here)[0].copy, None, "it has not come back yet");
        let NodeId::Spare(number) = replication.accept(OTHER, Some(ServerId(1)), 0).you else {
            panic!("it serves nothing")
        };
        assert_eq!(replication.poll(Time::ZERO, &plan, is_here), None);
        let remembered = replication.remembered(Some(&plan));
        assert_eq!(remembered.numbers, [(ServerId(0), SERVING), (ServerId(1), OTHER)]);
        replication.register(number, "host:2".into());
        let Some(Order::Change(change)) = replication.poll(Time::ZERO, &plan, is_here) else {
            panic!("it has come back without the copy")
        };
        plan.apply(3, &change);
        assert_eq!(plan.shards[0].copy, None);
        assert!(matches!(replication.poll(Time::ZERO, &plan, is_here), Some(Order::Keep { .. })));
    }
}
