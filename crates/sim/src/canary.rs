//! Planted bugs. A swarm that does not find them would not find real ones either.

mod broken_replica;

pub use broken_replica::BrokenReplica;

use paramill_core::checkpoint::Response;
use paramill_core::consistency::{ClientSync, Consistency, Decision, PullView, SyncState};
use paramill_core::landing::{Destination, Landing};
use paramill_core::limits;
use paramill_core::prng::Prng;
use paramill_core::registry::{Entry, Registry};
use paramill_core::role::{Body, Lost, Output, Role};
use paramill_core::server::Shard;
use paramill_core::spec::{Spec, SpecError};
use paramill_core::types::{Clock, ConnectionId, NodeId, TableId, Time, WorkerId};
use paramill_core::wire::{Flags, Header, Hello, Kind, Refusal, Welcome, ack, group};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A bug to plant in every shard or every worker of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Canary {
    /// A push that is sent again after a broken connection is applied again. Found by counting pushes.
    Forgetful,
    /// Pulls are answered at once, whatever the consistency model. Found by the staleness of answers.
    Hasty,
    /// Every tenth pull is forgotten. Found by the lack of progress.
    Absent,
    /// Worker 0 is sent other parameters than everybody else. Found by comparing what is sent of a version.
    Partial,
    /// A frame that waited is sent with the header that it was made with, though its payload is newer. Found by comparing
    /// what is sent of a version.
    Stale,
    /// A push is acknowledged when its first frame is here. Found by counting pushes when the rest does not come.
    Early,
    /// A gradient of an old epoch is taken as if it were of the present one. Found by pushes that fail: what one codec made is
    /// not what another reads.
    Outdated,
    /// An application reads what is received before all of it is here. Found by comparing what it reads.
    Reused,
    /// A shard's image lacks its last push. Found by counting pushes when another process goes on from it.
    Dated,
    /// A worker computes on a copy that is one round older than its model allows. Found by the age of what it computes on.
    Outlived,
    /// Whose gradients are in a sum is not remembered: when its aggregator dies, they are taken again. Found by counting pushes.
    Anonymous,
    /// A shard takes its copy to have what has only been sent to it. Found by counting pushes when the copy takes over.
    Ungated,
    /// A process that a shard was taken from goes on with it. Found by comparing which inputs both have.
    Stubborn,
}

impl Canary {
    /// All of them.
    pub const ALL: [Canary; 13] = [
        Canary::Forgetful,
        Canary::Hasty,
        Canary::Absent,
        Canary::Partial,
        Canary::Stale,
        Canary::Early,
        Canary::Outdated,
        Canary::Reused,
        Canary::Dated,
        Canary::Outlived,
        Canary::Anonymous,
        Canary::Ungated,
        Canary::Stubborn,
    ];

    /// Whether it is a bug of shards; else it is one of workers.
    pub fn is_of_shards(self) -> bool {
        !matches!(self, Canary::Reused | Canary::Outlived) && !self.is_of_copies()
    }

    /// Whether it is a bug between a shard and its copy.
    pub fn is_of_copies(self) -> bool {
        matches!(self, Canary::Ungated | Canary::Stubborn)
    }

    /// The components as workers with this bug know them.
    pub fn workers_registry(self) -> Registry {
        let mut registry = Registry::builtin();
        if self == Canary::Outlived {
            for name in ["ssp", "dsps", "pssp"] {
                let &Entry { name, about, params, example, .. } =
                    registry.consistency.entry(name).expect("it is a model");
                registry.consistency.register(Entry { name, about, params, example, build: build_lax });
            }
        }
        registry
    }
}

/// A model whose bound for copies is one round too high.
#[derive(Debug)]
struct Lax(Box<dyn Consistency>);

fn build_lax(spec: &Spec) -> Result<Box<dyn Consistency>, SpecError> {
    Ok(Box::new(Lax(Registry::builtin().consistency.build(spec)?)))
}

impl Consistency for Lax {
    fn pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> Decision {
        self.0.pull(state, pull, rng)
    }

    fn client_sync(&self) -> ClientSync {
        match self.0.client_sync() {
            ClientSync::Cached { bound } => ClientSync::Cached { bound: bound + 1 },
            other => other,
        }
    }

    fn version_needed(&self, clock: Clock) -> Option<Clock> {
        self.0.version_needed(clock)
    }
}

/// A shard with a bug.
#[derive(Debug)]
pub struct BrokenShard {
    shard: Shard,
    canary: Canary,
    /// Frames of pushes that came before.
    seen: BTreeSet<(ConnectionId, TableId, Clock, u32)>,
    /// Gradients that came again, to be added to the next push of the same chunk.
    again: BTreeMap<(ConnectionId, TableId, u32), Vec<f32>>,
    pulls: u64,
    /// The shard before the last frame of its last push.
    image: Option<Vec<u8>>,
    /// Frames that the shard itself does not know of.
    outputs: VecDeque<Output>,
}

impl BrokenShard {
    /// Plants a bug in a shard.
    pub fn new(shard: Shard, canary: Canary) -> BrokenShard {
        BrokenShard {
            shard,
            canary,
            seen: BTreeSet::new(),
            again: BTreeMap::new(),
            pulls: 0,
            image: None,
            outputs: VecDeque::new(),
        }
    }

    /// The shard inside.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The image that another process would go on from.
    pub fn image(&self) -> Vec<u8> {
        let dated = self.image.clone().filter(|_| self.canary == Canary::Dated);
        dated.unwrap_or_else(|| self.shard.image().encode())
    }

    fn apply_again(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        let place = (connection, header.table, header.chunk);
        // What a codec made has no sum.
        let dense = !header.flags.has(Flags::ROWS) && !header.flags.has(Flags::ENCODED);
        let values = |bytes: &[u8]| -> Vec<f32> {
            bytes
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect()
        };
        if !self.seen.insert((connection, header.table, header.clock, header.part)) {
            if dense {
                self.again.insert(place, values(payload));
            }
            return self.shard.handle_frame(now, connection, header, payload);
        }
        match self.again.remove(&place) {
            Some(again) if dense => {
                let sum =
                    values(payload).iter().zip(&again).map(|(one, other)| one + other).collect::<Vec<_>>();
                let bytes: Vec<u8> = sum.iter().flat_map(|value| value.to_le_bytes()).collect();
                self.shard.handle_frame(now, connection, header, &bytes);
            }
            _ => self.shard.handle_frame(now, connection, header, payload),
        }
    }

    fn answer_at_once(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        let mut frame = *header;
        if header.kind == Kind::Pull {
            frame.flags = frame.flags.with(Flags::NOW);
            return self.shard.handle_frame(now, connection, &frame, payload);
        }
        let wants = header.flags.has(Flags::WANT_PARAMS);
        frame.flags = Flags(frame.flags.0 & !Flags::WANT_PARAMS.0);
        self.shard.handle_frame(now, connection, &frame, payload);
        if wants && header.flags.has(Flags::LAST) {
            let mut pull = Header { kind: Kind::Pull, flags: Flags::NOW, payload_bytes: 0, ..*header };
            pull.clock += 1;
            self.shard.handle_frame(now, connection, &pull, &[]);
        }
    }

    fn forget_some(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        let mut frame = *header;
        let is_pull = header.kind == Kind::Pull || header.flags.has(Flags::WANT_PARAMS.with(Flags::LAST));
        self.pulls += u64::from(is_pull);
        if is_pull && self.pulls.is_multiple_of(10) {
            if header.kind == Kind::Pull {
                return;
            }
            frame.flags = Flags(frame.flags.0 & !Flags::WANT_PARAMS.0);
        }
        self.shard.handle_frame(now, connection, &frame, payload);
    }
}

impl Role for BrokenShard {
    fn node(&self) -> Option<NodeId> {
        self.shard.node()
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.shard.accept(now, hello)
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        self.shard.hello(connection)
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        self.shard.handle_connected(now, connection, welcome);
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        self.shard.handle_disconnected(now, connection, why);
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        match (self.canary, header.kind) {
            (Canary::Forgetful, Kind::Push) => self.apply_again(now, connection, header, payload),
            (Canary::Hasty, Kind::Push | Kind::Pull) => self.answer_at_once(now, connection, header, payload),
            (Canary::Absent, Kind::Push | Kind::Pull) => self.forget_some(now, connection, header, payload),
            (Canary::Early, Kind::Push) => {
                if header.part == 0 && !header.flags.has(Flags::LAST) {
                    let frame = ack::frame(&[header.request]);
                    self.outputs.push_back(Output::send(connection, frame));
                }
                self.shard.handle_frame(now, connection, header, payload);
            }
            (Canary::Dated, Kind::Push) => {
                if header.flags.has(Flags::LAST) {
                    self.image = Some(self.shard.image().encode());
                }
                self.shard.handle_frame(now, connection, header, payload);
            }
            (Canary::Outdated, Kind::Push) => {
                let header = Header { epoch: self.shard.epoch(), ..*header };
                self.shard.handle_frame(now, connection, &header, payload);
            }
            (Canary::Anonymous, Kind::Contributors) => {
                // As many as there are, and no members.
                let count = payload.len() as u32 / 4;
                let ranks: Vec<WorkerId> =
                    (limits::MAX_WORKERS - count..limits::MAX_WORKERS).map(WorkerId).collect();
                self.shard.handle_frame(now, connection, header, &group::encode_ranks(&ranks));
            }
            _ => self.shard.handle_frame(now, connection, header, payload),
        }
    }

    fn landing(
        &mut self,
        connection: ConnectionId,
        header: &Header,
        frames: usize,
        places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        self.shard.landing(connection, header, frames, places)
    }

    fn handle_landed(&mut self, now: Time, connection: ConnectionId, header: &Header) {
        self.shard.handle_landed(now, connection, header);
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.shard.progress(connection)
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        self.shard.handle_archived(now, response);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.shard.handle_timeout(now);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.shard.next_timeout()
    }

    fn poll_output(&mut self) -> Option<Output> {
        let mut output = self.outputs.pop_front().or_else(|| self.shard.poll_output())?;
        if let Output::Send { to: ConnectionId::Node(NodeId::Worker(WorkerId(0))), frame, .. } = &mut output
            && frame.header.kind == Kind::Params
            && self.canary == Canary::Partial
            && !frame.header.flags.has(Flags::ENCODED)
        {
            let mut bytes = self.shard.payload(&frame.body).to_vec();
            // The lowest bit of the first value.
            bytes.first_mut().into_iter().for_each(|byte| *byte ^= 1);
            frame.body = Body::Bytes(bytes);
        }
        Some(output)
    }

    fn refresh(&self, header: &mut Header) {
        if self.canary != Canary::Stale {
            self.shard.refresh(header);
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        self.shard.payload(body)
    }

    fn backlog_bytes(&self) -> usize {
        self.shard.backlog_bytes()
    }

    fn check(&self) -> Result<(), String> {
        self.shard.check()
    }
}
