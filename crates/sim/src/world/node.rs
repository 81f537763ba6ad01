//! A node: a role, its connections, and how it lives.

use super::event::Event;
use super::reader::Reader;
use crate::network::HostId;
use paramill_core::prng::Prng;
use paramill_core::role::Role;
use paramill_core::types::{ConnectionId, NodeId, Time};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Node<R> {
    pub(super) id: NodeId,
    pub(super) host: HostId,
    pub(super) role: R,
    /// Decides the jitter of what it sends outside of connections.
    pub(super) dice: Prng,
    /// Its connections by the names that its role gave them.
    pub(super) connections: BTreeMap<ConnectionId, usize>,
    /// The newest connection of each opener, by node and by that node's name for it.
    pub(super) openers: BTreeMap<(usize, ConnectionId), usize>,
    /// How often it was started anew: what an earlier process began does not concern the next one.
    pub(super) life: u32,
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
}

impl<R> Node<R> {
    pub(super) fn new(id: NodeId, host: HostId, handling: Duration, dice: Prng, role: R) -> Node<R> {
        Node {
            id,
            host,
            role,
            dice,
            connections: BTreeMap::new(),
            openers: BTreeMap::new(),
            life: 0,
            reader: Reader::default(),
            timer: None,
            handling,
            busy_until: Time::ZERO,
            paused_until: Time::ZERO,
            postponed: VecDeque::new(),
            unchecked: 0,
            ended: None,
        }
    }
}

impl<R: Role> Node<R> {
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
    }
}
