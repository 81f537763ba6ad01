//! Roles in one place with a network that delivers at once: enough to test decisions without any driver.

use paramill_core::address::Addresses;
use paramill_core::aggregator::{Aggregator, AggregatorConfig};
use paramill_core::coordinator::{Coordinator, JobConfig};
use paramill_core::registry::Registry;
use paramill_core::role::{Frame, Lost, Output, Role};
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::types::{ConnectionId, ProcessId, TableId, Time};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Control, Header, Hello, Kind, Party};
use paramill_core::worker::{Ticket, Worker, WorkerConfig, WorkerError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) struct Pump {
    pub(crate) now: Time,
    pub(crate) coordinator: Coordinator,
    pub(crate) shards: Vec<Shard>,
    pub(crate) workers: Vec<Worker>,
    pub(crate) aggregators: Vec<Aggregator>,
    pub(crate) log: Vec<String>,
    pub(crate) stopped: Vec<Option<String>>,
    /// Pairs that cannot reach each other, by index in `nodes`.
    pub(crate) cut: BTreeSet<(usize, usize)>,
    /// What a node calls a connection: which node is at the other end, and what that one calls it.
    names: BTreeMap<(usize, ConnectionId), (usize, ConnectionId)>,
    /// From whom, to whom, what the receiver calls the connection.
    wires: VecDeque<(usize, usize, ConnectionId, Header, Vec<u8>)>,
    /// Frames between these two stay where they are.
    held: Option<(usize, usize)>,
    /// Nodes that stand still: they are not called, and what they are sent waits.
    pub(crate) stopped_nodes: BTreeSet<usize>,
    /// Payload bytes of gradients that shards were sent.
    pub(crate) pushed_bytes: u64,
    /// Frames of acknowledgements.
    pub(crate) ack_frames: usize,
}

fn new_worker(now: Time, job: &str, aggregator: Option<String>) -> Worker {
    let aggregator = aggregator.map(Addresses::from);
    // Over all pumps of this process, as a driver counts them.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let config = WorkerConfig {
        job: job.into(),
        rank: None,
        coordinator: "coordinator".into(),
        aggregator,
        number: NUMBER.fetch_add(1, Ordering::Relaxed),
    };
    Worker::new(now, config, Arc::new(Registry::builtin()))
}

fn new_aggregator(now: Time, job: &str, index: usize, process: u64) -> Aggregator {
    let config = AggregatorConfig {
        job: job.into(),
        process: ProcessId(process),
        id: None,
        addresses: format!("aggregator:{index}").into(),
        coordinator: "coordinator".into(),
        hold: Duration::from_millis(5),
    };
    Aggregator::new(now, config, Arc::new(Registry::builtin()))
}

/// Node 0 is the coordinator, then the shards, then the aggregators, then the workers.
impl Pump {
    pub(crate) fn new(config: JobConfig, cores: u32) -> Pump {
        Pump::with_aggregators(config, cores, &[])
    }

    /// `aggregators` says through which one each worker goes; workers that are not named go to the servers themselves.
    pub(crate) fn with_aggregators(config: JobConfig, cores: u32, aggregators: &[usize]) -> Pump {
        let registry = Arc::new(Registry::builtin());
        config.check(&registry).expect("a valid job");
        let (job, workers, servers) = (config.job.clone(), config.workers, config.servers);
        let shards = (0..servers)
            .flat_map(|server| (0..cores).map(move |core| (server, core)))
            .map(|(server, core)| {
                let config = ShardConfig {
                    job: job.clone(),
                    process: ProcessId(u64::from(server) + 100),
                    server: None,
                    core,
                    cores,
                    addresses: format!("shard:{}", server * cores + core).into(),
                    coordinator: "coordinator".into(),
                };
                Shard::new(Time::ZERO, config, registry.clone())
            })
            .collect();
        let through = |rank: u32| aggregators.get(rank as usize).map(|index| format!("aggregator:{index}"));
        let workers = (0..workers).map(|rank| new_worker(Time::ZERO, &job, through(rank))).collect();
        let count = aggregators.iter().max().map_or(0, |last| last + 1);
        let aggregators = (0..count).map(|index| new_aggregator(Time::ZERO, &job, index, 200 + index as u64));
        let aggregators = aggregators.collect();
        Pump {
            now: Time::ZERO,
            coordinator: Coordinator::new(config, registry, 1),
            shards,
            workers,
            aggregators,
            log: Vec::new(),
            stopped: Vec::new(),
            cut: BTreeSet::new(),
            names: BTreeMap::new(),
            wires: VecDeque::new(),
            held: None,
            stopped_nodes: BTreeSet::new(),
            pushed_bytes: 0,
            ack_frames: 0,
        }
    }

    pub(crate) fn worker_node(&self, worker: usize) -> usize {
        1 + self.shards.len() + self.aggregators.len() + worker
    }

    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn aggregator_node(&self, aggregator: usize) -> usize {
        1 + self.shards.len() + aggregator
    }

    /// The process of an aggregator ends, and another comes in its place.
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn restart_aggregator(&mut self, index: usize, job: &str) {
        let node = self.aggregator_node(index);
        self.aggregators[index] = new_aggregator(self.now, job, index, 900);
        for other in 0..self.node_count() {
            self.reset(node, other);
        }
    }

    /// Another worker process comes; its index in `workers`.
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn add_worker(&mut self, job: &str) -> usize {
        self.workers.push(new_worker(self.now, job, None));
        self.workers.len() - 1
    }

    /// Puts a frame on the wire as if `from` had sent it.
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn inject(&mut self, from: usize, to: usize, frame: Frame) {
        let payload = frame.body.bytes().expect("an injected frame has its bytes with it").to_vec();
        let of_pair = |((at, _), (peer, _)): &(&(usize, ConnectionId), &(usize, ConnectionId))| {
            (*at, *peer) == (to, from)
        };
        if let Some((&(_, name), _)) = self.names.iter().find(of_pair) {
            self.wires.push_back((from, to, name, frame.header, payload));
        }
    }

    /// A command says something to the coordinator and goes away.
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn command(&mut self, job: &str, message: &Control) {
        let hello = Hello { job: job.into(), from: Party::Command, incarnation: 0 };
        let you = self.coordinator.accept(self.now, &hello).expect("commands are welcome").you;
        let Frame { header, body } = frame(Kind::Control, message);
        let payload = body.bytes().expect("a control frame has its bytes with it");
        self.coordinator.handle_frame(self.now, you.into(), &header, payload);
        self.coordinator.handle_disconnected(self.now, you.into(), &Lost::Broken("done".into()));
        self.run();
    }

    /// Declares the same tables on all workers and starts the job.
    pub(crate) fn start(&mut self, tables: &[(paramill_core::table::TableSpec, Vec<f32>)]) {
        let tickets = self.declare_and_start(tables);
        for (worker, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(self.outcome(worker, ticket), Some(Ok(())), "{}", self.explain(worker, ticket));
        }
    }

    /// The same without a look at what comes of it.
    pub(crate) fn declare_and_start(
        &mut self,
        tables: &[(paramill_core::table::TableSpec, Vec<f32>)],
    ) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for worker in 0..self.workers.len() {
            for (spec, initial) in tables {
                self.workers[worker].declare(spec.clone(), initial.clone()).expect("a valid table");
            }
            tickets.push(self.workers[worker].start(self.now).expect("starts once"));
        }
        self.run();
        tickets
    }

    pub(crate) fn outcome(&mut self, worker: usize, ticket: Ticket) -> Option<Result<(), WorkerError>> {
        self.workers[worker].outcome(ticket)
    }

    pub(crate) fn explain(&self, worker: usize, ticket: Ticket) -> String {
        self.workers[worker].explain(self.now, ticket)
    }

    /// A table's parameters, put together from all shards.
    pub(crate) fn parameters(&self, table: TableId, elements: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; elements];
        for shard in &self.shards {
            shard.for_each_chunk(table, |start, chunk| {
                values[start as usize..start as usize + chunk.len()].copy_from_slice(chunk);
            });
        }
        values
    }

    /// Lets `seconds` pass, timers included.
    pub(crate) fn pass(&mut self, seconds: f64) {
        let end = self.now + Duration::from_secs_f64(seconds);
        loop {
            let next = self.running().into_iter().filter_map(|node| self.role(node).next_timeout()).min();
            match next {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
            self.run();
        }
        self.now = end;
        self.run();
    }

    /// Carries out everything that can happen now.
    pub(crate) fn run(&mut self) {
        loop {
            let now = self.now;
            for node in self.running() {
                if self.role(node).next_timeout().is_some_and(|at| at <= now) {
                    self.role(node).handle_timeout(now);
                }
            }
            let mut moved = false;
            for node in self.running() {
                while let Some(output) = self.role(node).poll_output() {
                    moved = true;
                    self.carry_out(node, output);
                }
            }
            while let Some(place) = self.wires.iter().position(|(from, to, ..)| {
                self.held != Some((*from, *to)) && !self.stopped_nodes.contains(to)
            }) {
                let (from, to, name, header, payload) = self.wires.remove(place).expect("it is there");
                moved = true;
                if self.names.get(&(to, name)).is_some_and(|(peer, _)| *peer == from) {
                    self.role(to).handle_frame(now, name, &header, &payload);
                }
            }
            if !moved {
                break;
            }
        }
    }

    /// Brings up to `count` frames from one node to another, and nothing else. The request of the next one that waits.
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn deliver(&mut self, from: usize, to: usize, count: usize) -> Option<u64> {
        while let Some(output) = self.role(from).poll_output() {
            self.carry_out(from, output);
        }
        let is_it = |wire: &(usize, usize, ConnectionId, Header, Vec<u8>)| (wire.0, wire.1) == (from, to);
        for _ in 0..count {
            let Some(place) = self.wires.iter().position(is_it) else { break };
            let (_, _, name, header, payload) = self.wires.remove(place).expect("it is there");
            let now = self.now;
            self.role(to).handle_frame(now, name, &header, &payload);
        }
        self.wires.iter().find(|wire| is_it(wire)).map(|(_, _, _, header, _)| header.request)
    }

    /// Keeps back what one node sends to another, until [`Pump::release`].
    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn hold(&mut self, from: usize, to: usize) {
        self.held = Some((from, to));
    }

    #[allow(dead_code, reason = "not every test that shares this file needs it")]
    pub(crate) fn release(&mut self) {
        self.held = None;
    }

    /// Breaks the connection between two nodes; what is on the wire between them is lost.
    pub(crate) fn reset(&mut self, a: usize, b: usize) {
        self.wires.retain(|(from, to, ..)| (*from, *to) != (a, b) && (*from, *to) != (b, a));
        let ends: Vec<(usize, ConnectionId)> = self
            .names
            .iter()
            .filter(|((at, _), (peer, _))| (*at, *peer) == (a, b) || (*at, *peer) == (b, a))
            .map(|(key, _)| *key)
            .collect();
        let now = self.now;
        for (at, name) in ends {
            self.names.remove(&(at, name));
            self.role(at).handle_disconnected(now, name, &Lost::Broken("reset".into()));
        }
    }

    /// Nobody reaches the node any more.
    pub(crate) fn isolate(&mut self, node: usize) {
        for other in 0..self.node_count() {
            self.reset(node, other);
            self.cut.insert((node, other));
            self.cut.insert((other, node));
        }
    }

    fn carry_out(&mut self, node: usize, output: Output) {
        match output {
            Output::Log(line) => self.log.push(line),
            Output::Stop { error } => self.stopped.push(error),
            Output::Disconnect { connection } => self.disconnect(node, connection),
            Output::Connect { connection, address } => self.connect(node, connection, &address),
            Output::Send { to, frame } => {
                let payload = self.role(node).payload(&frame.body).to_vec();
                assert_eq!(payload.len(), frame.header.payload_bytes as usize, "{:?}", frame.header);
                if let Some(&(peer, name)) = self.names.get(&(node, to)) {
                    self.ack_frames += usize::from(frame.header.kind == Kind::PushAck);
                    if (1..=self.shards.len()).contains(&peer) && frame.header.kind == Kind::Push {
                        self.pushed_bytes += payload.len() as u64;
                    }
                    self.wires.push_back((node, peer, name, frame.header, payload));
                }
            }
        }
    }

    /// One end closes; the other is told once it has everything that was sent before.
    fn disconnect(&mut self, node: usize, name: ConnectionId) {
        let Some((peer, back)) = self.names.remove(&(node, name)) else { return };
        let now = self.now;
        self.names.remove(&(peer, back));
        self.role(peer).handle_disconnected(now, back, &Lost::Broken("closed".into()));
    }

    fn connect(&mut self, node: usize, name: ConnectionId, address: &str) {
        let index = |number: &str| number.parse::<usize>().expect("an index");
        let to = match address.split_once(':') {
            Some(("shard", number)) => 1 + index(number),
            Some(("aggregator", number)) => self.aggregator_node(index(number)),
            _ => 0,
        };
        let now = self.now;
        if self.cut.contains(&(node, to)) {
            return self.role(node).handle_disconnected(now, name, &Lost::Broken("no route".into()));
        }
        let hello = self.role(node).hello(name);
        assert_ne!(hello.from, Party::Command);
        match self.role(to).accept(now, &hello) {
            Ok(welcome) => {
                let back = hello.connection(welcome.you);
                self.names.insert((node, name), (to, back));
                self.names.insert((to, back), (node, name));
                self.role(node).handle_connected(now, name, &welcome);
            }
            Err(refusal) => self.role(node).handle_disconnected(now, name, &Lost::Refused(refusal)),
        }
    }

    fn running(&self) -> Vec<usize> {
        (0..self.node_count()).filter(|node| !self.stopped_nodes.contains(node)).collect()
    }

    fn node_count(&self) -> usize {
        1 + self.shards.len() + self.aggregators.len() + self.workers.len()
    }

    fn role(&mut self, node: usize) -> &mut dyn Role {
        let (shards, aggregators) = (self.shards.len(), self.aggregators.len());
        match node {
            0 => &mut self.coordinator,
            node if node <= shards => &mut self.shards[node - 1],
            node if node <= shards + aggregators => &mut self.aggregators[node - 1 - shards],
            node => &mut self.workers[node - 1 - shards - aggregators],
        }
    }
}
