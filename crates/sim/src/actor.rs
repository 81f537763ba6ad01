//! The roles of a job, as one type for the world.

use crate::canary::{Broken, CopyBug, ShardBug};
use crate::operator::Operator;
use crate::player::Player;
use crate::spectator::Spectator;
use paramill_core::address::Addresses;
use paramill_core::aggregator::Aggregator;
use paramill_core::checkpoint::Response;
use paramill_core::coordinator::Coordinator;
use paramill_core::landing::{Destination, Landing};
use paramill_core::replica::Replica;
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::server::Shard;
use paramill_core::types::{ConnectionId, NodeId, Time};
use paramill_core::wire::{Header, Hello, Refusal, Welcome};
use paramill_core::worker::Worker;

/// Anything that takes part in a simulated job.
#[derive(Debug)]
pub enum Actor {
    /// The coordinator.
    Coordinator(Box<Coordinator>),
    /// A data core.
    Shard(Box<Replica>),
    /// A data core with a planted bug.
    Broken(Box<Broken<Shard, ShardBug>>),
    /// A data core with a bug that copies suffer from.
    BrokenReplica(Box<Broken<Replica, CopyBug>>),
    /// Something between workers and data cores.
    Aggregator(Box<Aggregator>),
    /// A worker and its application.
    Worker(Box<Player>),
    /// A worker without an application: whoever has the world calls it.
    Bare(Box<Worker>),
    /// A reader that comes and goes.
    Reader(Box<Spectator>),
    /// Somebody who gives commands while the job runs.
    Operator(Box<Operator>),
}

impl Actor {
    /// The shard, if it is one, with or without a planted bug.
    pub fn as_shard(&self) -> Option<&Shard> {
        match self {
            Actor::Shard(replica) => replica.shard(),
            Actor::Broken(broken) => Some(broken.role()),
            Actor::BrokenReplica(broken) => broken.role().shard(),
            _ => None,
        }
    }

    /// The data core, if it is one that has copies.
    pub fn as_replica(&self) -> Option<&Replica> {
        match self {
            Actor::Shard(replica) => Some(replica),
            Actor::BrokenReplica(broken) => Some(broken.role()),
            _ => None,
        }
    }

    /// The worker with its application, if it is one.
    pub fn as_player(&self) -> Option<&Player> {
        match self {
            Actor::Worker(player) => Some(player),
            _ => None,
        }
    }

    fn role(&self) -> &dyn Role {
        match self {
            Actor::Coordinator(role) => &**role,
            Actor::Shard(role) => &**role,
            Actor::Broken(role) => &**role,
            Actor::BrokenReplica(role) => &**role,
            Actor::Aggregator(role) => &**role,
            Actor::Worker(role) => &**role,
            Actor::Bare(role) => &**role,
            Actor::Reader(role) => &**role,
            Actor::Operator(role) => &**role,
        }
    }

    fn role_mut(&mut self) -> &mut dyn Role {
        match self {
            Actor::Coordinator(role) => &mut **role,
            Actor::Shard(role) => &mut **role,
            Actor::Broken(role) => &mut **role,
            Actor::BrokenReplica(role) => &mut **role,
            Actor::Aggregator(role) => &mut **role,
            Actor::Worker(role) => &mut **role,
            Actor::Bare(role) => &mut **role,
            Actor::Reader(role) => &mut **role,
            Actor::Operator(role) => &mut **role,
        }
    }
}

impl Role for Actor {
    fn node(&self) -> Option<NodeId> {
        self.role().node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.role_mut().accept(now, hello)
    }

    fn handle_listening(&mut self, now: Time, addresses: Option<Addresses>) {
        self.role_mut().handle_listening(now, addresses);
    }

    fn handle_remembered(&mut self, now: Time) {
        self.role_mut().handle_remembered(now);
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        self.role_mut().handle_archived(now, response);
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.role().hello(connection)
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        self.role_mut().handle_connected(now, connection, welcome);
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        self.role_mut().handle_disconnected(now, connection, why);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        self.role_mut().handle_frame(now, connection, header, payload);
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.role_mut().landing(connection, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.role_mut().handle_landed(now, connection, header);
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.role().progress(connection)
    }

    fn handle_timeout(&mut self, now: Time) {
        self.role_mut().handle_timeout(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.role().next_timeout()
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.role_mut().poll_output()
    }

    fn backlog_bytes(&self) -> usize {
        self.role().backlog_bytes()
    }

    fn awaits_silence(&self) -> bool {
        self.role().awaits_silence()
    }

    fn handle_silence(&mut self, now: Time) {
        self.role_mut().handle_silence(now);
    }

    fn refresh(&self, header: &mut Header) {
        self.role().refresh(header);
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.role().payload(body)
    }

    fn check(&self) -> Result<(), String> {
        self.role().check()
    }
}
