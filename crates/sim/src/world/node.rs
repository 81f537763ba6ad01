//! A node: a role, its connections, and how it lives.

use super::World;
use super::event::Event;
use super::reader::Reader;
use crate::network::HostId;
use paramill_core::address::Addresses;
use paramill_core::prng::Prng;
use paramill_core::role::Role;
use paramill_core::types::{ConnectionId, NodeId, Time};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Node<R> {
    pub(super) id: NodeId,
    pub(super) host: HostId,
    /// The process that it belongs to, where several nodes do.
    pub(super) process: Option<u32>,
    pub(super) role: R,
    /// Decides the jitter of what it sends outside of connections.
    pub(super) dice: Prng,
    /// Its connections by the names that its role gave them.
    pub(super) connections: BTreeMap<ConnectionId, usize>,
    /// The newest connection of each opener, by node and by that node's name for it.
    pub(super) openers: BTreeMap<(usize, ConnectionId), usize>,
    /// How often it was started anew: what an earlier process began does not concern the next one.
    pub(super) life: u32,
    /// How often it is going to be started anew, if it is gone then.
    pub(super) restarts_due: u32,
    pub(super) reader: Reader,
    pub(super) timer: Option<Time>,
    /// Time that each frame occupies the node.
    pub(super) handling: Duration,
    pub(super) busy_until: Time,
    pub(super) paused_until: Time,
    /// Events that came while the node was paused.
    pub(super) postponed: VecDeque<Event>,
    /// Events since its role was last asked whether its account of itself adds up.
    pub(super) unchecked: usize,
    pub(super) ended: Option<Ended>,
    pub(super) disk: Disk,
}

/// What a node has stored, which outlives its process.
pub type Disk = Rc<RefCell<Option<Vec<u8>>>>;

/// How long a node's disk takes.
pub(super) const STORING: Duration = Duration::from_millis(2);

impl<R: Role> Node<R> {
    /// Its role is told where others reach it.
    pub(super) fn listen(&mut self, now: Time, addresses: Addresses) {
        self.role.handle_listening(now, Some(addresses));
    }

    /// What happens when this process has stored a state.
    pub(super) fn storing(&self, node: usize, state: Vec<u8>) -> Event {
        Event::Stored { node, life: self.life, state }
    }

    /// A state is on the disk. Whether the process is there that asked for it.
    pub(super) fn stored(&mut self, now: Time, life: u32, state: Vec<u8>) -> bool {
        let is_there = life == self.life;
        if is_there {
            *self.disk.borrow_mut() = Some(state);
            self.role.handle_remembered(now);
        }
        is_there
    }
}

impl<R> Node<R> {
    pub(super) fn new(id: NodeId, host: HostId, handling: Duration, dice: Prng, role: R) -> Node<R> {
        Node {
            id,
            host,
            process: None,
            role,
            dice,
            connections: BTreeMap::new(),
            openers: BTreeMap::new(),
            life: 0,
            restarts_due: 0,
            reader: Reader::default(),
            timer: None,
            handling,
            busy_until: Time::ZERO,
            paused_until: Time::ZERO,
            postponed: VecDeque::new(),
            unchecked: 0,
            ended: None,
            disk: Disk::default(),
        }
    }
}

impl<R: Role> Node<R> {
    /// Its name to those who watch: the shard that a node serves may have been another's before.
    pub(super) fn name(&self) -> NodeId {
        self.role.node().filter(|node| matches!(node, NodeId::Shard(_))).unwrap_or(self.id)
    }

    /// Whether the role's account of itself adds up.
    pub(super) fn check(&self) -> Result<(), String> {
        let Node { id, role, .. } = self;
        let backlog = role.backlog_bytes();
        if backlog > 0 {
            return Err(format!("{id} counts {backlog} bytes of outputs, and all were taken"));
        }
        role.check().map_err(|what| format!("{id}: {what}"))
    }
}

/// Makes the role of a node that is started anew, where its last one is seen.
pub(super) struct Rebirth<R>(pub(super) Box<Build<R>>);

type Build<R> = dyn FnOnce(Time, &R) -> R;

impl<R> fmt::Debug for Rebirth<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rebirth")
    }
}

/// Whether something may happen in a world.
pub type Condition<R> = Box<dyn Fn(&World<R>) -> bool>;

/// Makes a node that is started anew.
pub type Birth<R> = Box<dyn FnOnce(Time) -> R>;

/// Makes a node that is started beside another one.
type Beginning<R> = Box<dyn Fn(Time, NodeId, &R) -> Newcomer<R>>;

/// How a process dies.
pub struct Death<R> {
    /// Whether it may.
    pub may_die: Condition<R>,
    /// It does not die later than that.
    pub until: Time,
    /// How long after its death its nodes are started anew.
    pub after: Duration,
    /// These nodes, and what makes their roles.
    pub restarts: Vec<(NodeId, Birth<R>)>,
}

impl<R> fmt::Debug for Death<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Death")
    }
}

/// A node that is started by another one of its process.
pub struct Newcomer<R> {
    /// Its name.
    pub id: NodeId,
    /// Where others reach it.
    pub address: String,
    /// Its role.
    pub role: R,
}

/// Makes the nodes that others start.
pub(super) struct Starter<R>(pub(super) Beginning<R>);

impl<R> fmt::Debug for Starter<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Starter")
    }
}

/// How a node's life ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// By its own word.
    Stopped {
        /// Why it failed, if it did.
        error: Option<String>,
    },
    /// By a fault.
    Crashed,
    /// It has not begun: its process is started later.
    NotStarted,
}

/// A number for a node, so that its dice do not depend on anybody else's.
pub(super) fn label(id: NodeId) -> u64 {
    match id {
        NodeId::Coordinator => 1,
        NodeId::Admin(number) => 2 << 40 | u64::from(number),
        NodeId::Worker(worker) => 3 << 40 | u64::from(worker.0),
        NodeId::Shard(shard) => 4 << 40 | u64::from(shard.server.0) << 16 | u64::from(shard.core),
        NodeId::Aggregator(aggregator) => 5 << 40 | u64::from(aggregator.0),
        NodeId::Spare(number) => 6 << 40 | u64::from(number),
    }
}
