//! A data core that serves a shard, or keeps a copy of one: replication, fail-over and migration are one mechanism.
//!
//! A [`Shard`] is a state machine: the same inputs in the same order make the same shard. The process that serves it sends every
//! input to its copies (a log), which apply it too and say nothing to anybody. A copy begins with an image of the shard, catches up
//! with the log, and from then on no input is applied by the serving process before the copy has it. So a copy has whatever was
//! acknowledged or answered, and a process that the shard was taken from cannot go on by itself: nobody would have its inputs.
//!
//! The coordinator gives a shard to the process of a copy that is in sync by a change of the plan, because the serving process is gone,
//! or to move the shard. All connections count as broken then: workers come to the new process and send again what was not
//! acknowledged.

mod copy_of;
mod entry;
mod log;
mod lull;

use crate::address::Addresses;
use crate::checkpoint::Response;
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Body, Frame, Level, Lost, Outbox, Output, Role};
use crate::server::{Shard, ShardConfig};
use crate::types::{ConnectionId, CopyId, NodeId, ProcessId, ShardId, Time};
use crate::wire::control::{self, frame};
use crate::wire::{Control, Flags, Header, Hello, Kind, Party, Plan, Refusal, ServedShard, Welcome};
use copy_of::{CopyOf, Former, discard, note_connections};
use entry::Event;
use log::Log;
use lull::{Lull, Rounds};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// In place of chunks that are not here any more.
static BLANK: [u8; limits::MAX_DATA_BYTES] = [0; limits::MAX_DATA_BYTES];

/// One data core of a server: it serves a shard, keeps a copy of one, or waits to be given one.
#[derive(Debug)]
pub struct Replica {
    config: ShardConfig,
    registry: Arc<Registry>,
    mode: Mode,
    /// What is added to the driver's time for the shard: it goes on in the time of the process that served it before.
    shift: i64,
    /// The connections that the shard knows of.
    connections: BTreeSet<ConnectionId>,
    outputs: Outbox,
    stopped: bool,
}

#[derive(Debug)]
enum Mode {
    Serving(Serving),
    Spare(Spare),
}

/// A shard that is served here.
#[derive(Debug)]
struct Serving {
    shard: Box<Shard>,
    /// The connection to the coordinator is this core's business: the coordinator says when a copy need not be waited for, and has to
    /// be reached while inputs wait.
    coordinator: Link,
    log: Log,
    /// The newest epoch that the coordinator told of.
    epoch: u32,
    /// A time-out is logged and not applied yet.
    has_timeout: bool,
    /// Copies that are to begin with an image, which is made when all inputs are applied and no connection stands.
    beginning: BTreeMap<u32, Beginning>,
    /// Connections whose end is logged and not applied yet, and how often: what the shard sends there is for a connection that is gone, and
    /// must not leave by one of the same name.
    severed: BTreeMap<ConnectionId, u32>,
}

/// A copy that is to begin.
#[derive(Debug, Clone, Copy)]
struct Beginning {
    copy: CopyId,
    /// It is to serve the shard as soon as it has everything.
    is_move: bool,
    /// The moment that its image waits for, until it has come.
    lull: Option<Lull>,
}

impl Serving {
    fn rounds(&self) -> Rounds {
        Rounds { is_open: self.shard.is_in_a_round(), has_sums: self.shard.has_sums() }
    }

    /// Whether images that are to be made wait for a better moment. The shard serves on.
    fn awaits_lull(&self) -> bool {
        self.beginning.values().any(|copy| copy.lull.is_some())
    }

    /// Looks whether that moment has come.
    fn look_for_lull(&mut self, now: Time, is_silent: bool) {
        if self.awaits_lull() {
            let rounds = self.rounds();
            for copy in self.beginning.values_mut() {
                copy.lull.take_if(|lull| lull.is_here(now, rounds, is_silent));
            }
        }
    }

    /// Takes what the shard says, after an input, to those who are still connected.
    fn take_outputs(&mut self, outputs: &mut Outbox) {
        while let Some(output) = self.shard.poll_output() {
            let to = match &output {
                Output::Send { to, .. } => Some(*to),
                Output::Disconnect { connection } => Some(*connection),
                _ => None,
            };
            if !is_own_business(&output) && to.is_none_or(|to| !self.severed.contains_key(&to)) {
                outputs.push_back(output);
            }
        }
    }
}

/// A connection to the coordinator is asked for by the core, not by its shard.
fn is_own_business(output: &Output) -> bool {
    matches!(output, Output::Connect { connection: ConnectionId::Node(NodeId::Coordinator), .. })
}

/// A core that serves nothing.
#[derive(Debug)]
struct Spare {
    number: Option<u32>,
    coordinator: Link,
    copy: Option<CopyOf>,
}

impl Replica {
    /// A data core that is about to join: as one of those that a job begins with, unless the coordinator has another use for it.
    pub fn new(now: Time, config: ShardConfig, registry: Arc<Registry>) -> Replica {
        let shard = Shard::new(now, config.clone(), registry.clone());
        Replica::serving(now, shard, config, registry)
    }

    /// A data core that serves this shard.
    pub fn serving(now: Time, shard: Shard, config: ShardConfig, registry: Arc<Registry>) -> Replica {
        let coordinator = Link::new(now, NodeId::Coordinator, Addresses::list(&config.coordinator));
        Replica {
            config,
            registry,
            mode: Mode::Serving(Serving {
                shard: Box::new(shard),
                coordinator,
                log: Log::default(),
                epoch: 0,
                has_timeout: false,
                beginning: BTreeMap::new(),
                severed: BTreeMap::new(),
            }),
            shift: 0,
            connections: BTreeSet::new(),
            outputs: Outbox::default(),
            stopped: false,
        }
    }

    /// The process that this core belongs to.
    pub fn process(&self) -> ProcessId {
        self.config.process
    }

    /// The number of this core in its process.
    pub fn core(&self) -> u32 {
        self.config.core
    }

    /// The shard that is served here.
    pub fn shard(&self) -> Option<&Shard> {
        match &self.mode {
            Mode::Serving(serving) => Some(&serving.shard),
            Mode::Spare(_) => None,
        }
    }

    /// The same, for tests that look into it or break it.
    pub fn shard_mut(&mut self) -> Option<&mut Shard> {
        match &mut self.mode {
            Mode::Serving(serving) => Some(&mut serving.shard),
            Mode::Spare(_) => None,
        }
    }

    /// The shard that a copy is kept of here, once its image is here.
    pub fn copy(&self) -> Option<&Shard> {
        match &self.mode {
            Mode::Spare(Spare { copy: Some(CopyOf { shard: Some((shard, _)), .. }), .. }) => Some(shard),
            _ => None,
        }
    }

    /// How far the shard that is here is in the log of its inputs, by the process that wrote the log.
    pub fn position(&self) -> Option<(ProcessId, u64)> {
        match &self.mode {
            Mode::Serving(serving) if !serving.log.is_empty() => {
                Some((self.config.process, serving.log.applied()))
            }
            Mode::Spare(Spare { copy: Some(CopyOf { writer, shard: Some((_, has)), .. }), .. }) => {
                Some((*writer, *has))
            }
            _ => None,
        }
    }

    fn shifted(&self, now: Time) -> Time {
        Time(now.0.saturating_add_signed(self.shift))
    }

    /// Something happens to the shard that is served here.
    fn happen(&mut self, now: Time, event: Event<'_>) {
        note_connections(&event, &mut self.connections);
        let at = self.shifted(now);
        let Mode::Serving(serving) = &mut self.mode else { return };
        if serving.log.is_empty() {
            return event.apply(at, &mut serving.shard);
        }
        if let Event::Disconnected(connection, _) = &event {
            *serving.severed.entry(*connection).or_default() += 1;
        }
        for (copy, frame) in serving.log.append(now, event.encode(at)) {
            self.outputs.push_back(Output::send(NodeId::Spare(copy), frame));
        }
        self.advance(now);
    }

    /// Applies the inputs that copies have, and tells the coordinator what is new about them.
    fn advance(&mut self, now: Time) {
        let Mode::Serving(serving) = &mut self.mode else { return };
        while let Some(entry) = serving.log.take_ready() {
            let (at, event) = Event::decode(&entry).expect("this process wrote it");
            if matches!(event, Event::Timeout) {
                serving.has_timeout = false;
            }
            let ended = match &event {
                Event::Disconnected(connection, _) => Some(*connection),
                _ => None,
            };
            event.apply(at, &mut serving.shard);
            serving.take_outputs(&mut self.outputs);
            if let Some(connection) = ended
                && let Some(count) = serving.severed.get_mut(&connection)
            {
                *count -= 1;
                serving.severed.retain(|_, count| *count > 0);
            }
        }
        let Serving { log, epoch, .. } = serving;
        while let Some((copy, bytes)) = log.poll_in_sync(*epoch) {
            let message = Control::Copied { copy, epoch: *epoch, bytes };
            self.outputs.push_back(Output::send(NodeId::Coordinator, frame(Kind::Control, &message)));
        }
        while let Some(copy) = log.poll_lost(now) {
            let message = Control::CopyLost { copy };
            self.outputs.push_back(Output::send(NodeId::Coordinator, frame(Kind::Control, &message)));
        }
    }

    /// What the coordinator says to a core that serves a shard, as far as it is not about the shard alone. Whether the shard is to
    /// hear of it.
    fn hear_serving(&mut self, now: Time, message: &Control) -> bool {
        let own = self.config.process;
        let Mode::Serving(serving) = &mut self.mode else { return false };
        let id = serving.shard.id();
        match message {
            Control::StartCore => {
                self.outputs.push_back(Output::StartCore);
                return false;
            }
            Control::Plan(plan) => {
                serving.epoch = serving.epoch.max(plan.epoch);
                let served = id.and_then(|id| plan.served(id));
                let known = serving.shard.epoch();
                match served {
                    Some(served) if served.process != own && known > 0 => {
                        self.retire(now, Some(served));
                        return false;
                    }
                    Some(ServedShard { shard, process, .. }) if *process != own => {
                        serving.shard.fail(format!(
                            "the plan gives {shard} to {process}, and this is {own}; give each server its own number, or none"
                        ));
                        return false;
                    }
                    Some(ServedShard { copy, since, .. }) if *since > known => self.keep(*copy, *since),
                    _ => {}
                }
            }
            Control::Change { epoch, change } => {
                serving.epoch = serving.epoch.max(*epoch);
                if let Some(served) = change.served(*epoch)
                    && Some(served.shard) == id
                {
                    if served.process != own {
                        self.retire(now, Some(&served));
                        return false;
                    }
                    self.keep(served.copy, *epoch);
                }
            }
            Control::Patience { seconds } => {
                serving.coordinator.set_patience(control::patience(*seconds));
            }
            // The job is over, and copies may have gone before.
            Control::Stop { .. } => {
                serving.log.close();
                self.advance(now);
            }
            _ => {}
        }
        true
    }

    /// The coordinator has said which copy can take over. Others begin anew, if they are still wanted.
    fn keep(&mut self, copy: Option<CopyId>, since: u32) {
        let Mode::Serving(serving) = &mut self.mode else { return };
        for number in serving.log.keep(copy, since) {
            self.outputs.push_back(Output::Disconnect { connection: NodeId::Spare(number).into() });
        }
    }

    /// The shard is served by another process: this core has nothing to say about it any more, and may have its copy.
    fn retire(&mut self, now: Time, served: Option<&ServedShard>) {
        let at = self.shifted(now);
        let Mode::Serving(Serving { coordinator, .. }) = &self.mode else { return };
        let coordinator = coordinator.anew(now);
        let spare = Spare { number: None, coordinator, copy: None };
        let serving = match std::mem::replace(&mut self.mode, Mode::Spare(spare)) {
            Mode::Serving(serving) => serving,
            spare => return self.mode = spare,
        };
        let line = match serving.shard.id() {
            Some(id) => format!("{id} is served by another process from now on"),
            None => "this core is a spare one".into(),
        };
        let copies: Vec<ConnectionId> =
            serving.log.connected().map(|number| NodeId::Spare(number).into()).collect();
        // Frames that wait refer to the shard's memory.
        let connections = std::mem::take(&mut self.connections);
        self.outputs.retain(|output| !matches!(output, Output::Send { to, .. } if connections.contains(to)));
        let coordinator = ConnectionId::from(NodeId::Coordinator);
        for connection in connections.iter().copied().filter(|connection| *connection != coordinator) {
            self.outputs.push_back(Output::Abandon { connection });
        }
        for connection in copies.into_iter().chain([coordinator]) {
            self.outputs.push_back(Output::Disconnect { connection });
        }
        self.outputs.push_back(Output::Log(Level::Info, line));
        self.shift = 0;
        self.config.server = None;
        let wanted = served.and_then(|served| Some((served, served.copy?)));
        if let Some((served, copy)) = wanted.filter(|(_, copy)| copy.process == self.config.process) {
            self.connections = connections;
            self.keep_own(now, at, serving, served, copy.order);
        }
    }

    /// The shard that was served here remains as a copy of itself, until there is another.
    fn keep_own(&mut self, now: Time, at: Time, serving: Serving, served: &ServedShard, order: u64) {
        let Serving { mut shard, log, .. } = serving;
        discard(&mut shard);
        let (first, entries) = log.into_unapplied();
        // The shard knows those of which it has not heard that they ended.
        for entry in &entries {
            if let Ok((_, Event::Disconnected(connection, _))) = Event::decode(entry) {
                self.connections.insert(connection);
            }
        }
        let copy = CopyOf::of_own((now, at), served, order, shard, Former { first, entries });
        if let Mode::Spare(spare) = &mut self.mode {
            spare.copy = Some(copy);
        }
    }

    /// The coordinator has given this core, which said hello as one that a job begins with, a number among the spare ones.
    fn become_spare(&mut self, now: Time, number: u32) {
        if let Mode::Serving(serving) = &self.mode {
            if serving.shard.epoch() > 0 {
                // Everything else begins anew, with a connection of its own to the coordinator.
                return self.retire(now, None);
            }
            self.config.server = None;
            let coordinator = Link::new(now, NodeId::Coordinator, Addresses::list(&self.config.coordinator));
            self.mode = Mode::Spare(Spare { number: None, coordinator, copy: None });
        }
        let Mode::Spare(spare) = &mut self.mode else { return };
        let former = spare.number.replace(number);
        spare.coordinator.connected();
        // A copy is known by its number to the process that serves the shard.
        if let Some(copy) = spare.copy.take_if(|_| former.is_some_and(|former| former != number)) {
            self.outputs.push_back(Output::Disconnect { connection: copy.primary.connection() });
        }
        let kept = spare.copy.as_ref().filter(|copy| copy.shard.is_some());
        if let Some(message) = kept.map(|copy| Control::Kept { shard: copy.id, order: copy.order }) {
            self.tell_coordinator(&message);
        }
        self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
    }

    fn hear_spare(&mut self, now: Time, message: Control) {
        let Mode::Spare(spare) = &mut self.mode else { return };
        match message {
            Control::Keep { shard: id, from, order, moves } => {
                if let Some(copy) = spare.copy.take() {
                    self.outputs.push_back(Output::Disconnect { connection: copy.primary.connection() });
                }
                let primary = Link::new(now, NodeId::Shard(id), from);
                spare.copy = Some(CopyOf::ordered(id, order, primary, moves));
                self.handle_timeout(now);
            }
            Control::Promote(plan) => self.promote(now, *plan),
            Control::StartCore => self.outputs.push_back(Output::StartCore),
            Control::Patience { seconds } => {
                spare.coordinator.set_patience(control::patience(seconds));
            }
            Control::Stop { error } => self.stop(error.map(control::sentence)),
            other => self.log(format!("ignored a `{}` message from the coordinator", other.name())),
        }
    }

    /// This core serves the shard that it has a copy of from now on.
    fn promote(&mut self, now: Time, plan: Plan) {
        let Mode::Spare(spare) = &mut self.mode else { return };
        let coordinator = spare.coordinator.clone();
        let Some(CopyOf { id, shard: Some((mut shard, has)), time, primary, .. }) = spare.copy.take() else {
            return self.log("was asked to serve a shard of which no copy is here".into());
        };
        for connection in [primary.connection(), NodeId::Coordinator.into()] {
            self.outputs.push_back(Output::Disconnect { connection });
        }
        self.shift = i64::try_from(i128::from(time.0) - i128::from(now.0)).unwrap_or(0);
        let why = Lost::Broken(format!("{id} is served by another process"));
        let mut connections = std::mem::take(&mut self.connections);
        connections.insert(NodeId::Coordinator.into());
        let ends = connections.into_iter().map(|connection| Event::Disconnected(connection, why.clone()));
        let (epoch, served) = (plan.epoch, plan.served(id).cloned());
        let mut log = Log::of_epoch(served.as_ref().map_or(epoch, |served| served.since));
        let mut entries = vec![Event::Follows(has).encode(time)];
        for event in ends.chain([Event::TakenOver(Box::new(plan))]) {
            discard(&mut shard);
            entries.push(event.encode(time));
            event.apply(time, &mut shard);
        }
        if let Some(copy) = served.and_then(|served| served.copy) {
            log.await_former(now, copy, epoch, entries);
        }
        self.outputs.push_back(Output::Log(Level::Info, format!("serves {id} from now on")));
        shard.set_patience(coordinator.patience());
        self.mode = Mode::Serving(Serving {
            shard,
            coordinator: coordinator.anew(now),
            log,
            epoch,
            has_timeout: false,
            beginning: BTreeMap::new(),
            severed: BTreeMap::new(),
        });
    }

    /// What the process that serves a shard sends to a copy.
    fn hear_primary(&mut self, header: &Header, payload: &[u8]) -> Result<(), String> {
        let Replica { config, registry, mode, connections, .. } = self;
        let Mode::Spare(Spare { copy: Some(copy), coordinator, .. }) = mode else { return Ok(()) };
        match header.kind {
            Kind::Image => {
                let Some(image) = copy.take_image(header, payload)? else { return Ok(()) };
                let config =
                    ShardConfig { server: Some(copy.id.server), core: copy.id.core, ..config.clone() };
                let mut shard = Shard::from_image(copy.time, config, registry.clone(), image)?;
                shard.set_patience(coordinator.patience());
                connections.clear();
                copy.begin(shard, header.request);
                Ok(())
            }
            Kind::Entry => copy.take_entry(header.request, payload, connections),
            kind => Err(format!("a copy does not take {kind:?} frames")),
        }
    }

    /// A copy connects. One that lacks what is not in the log any more begins with an image, for which all other connections end: the
    /// shard and its copy are the same from then on.
    fn accept_copy(&mut self, now: Time, party: CopyHello) -> Result<Welcome, Refusal> {
        let refuse = |reason: &str| Err(Refusal { reason: reason.into(), retry: true });
        let CopyHello { copy, number, shard, has, moves } = party;
        let Mode::Serving(serving) = &mut self.mode else { return refuse("this core serves no shard") };
        if serving.shard.id() != Some(shard) || serving.shard.epoch() == 0 {
            return refuse("this core does not serve that shard");
        }
        let to = ConnectionId::from(NodeId::Spare(number));
        let welcome = Welcome { you: NodeId::Spare(number), incarnation: copy.process.0, session: 0 };
        serving.log.meet(number, copy);
        if let Some(has) = has.filter(|has| serving.log.can_resume(number, copy, *has)) {
            for frame in serving.log.resume(now, number, has) {
                self.outputs.push_back(Output::send(to, frame));
            }
            return Ok(welcome);
        }
        if !serving.log.admit(number, copy) {
            self.advance(now);
            return refuse("the coordinator is about to say whether this copy is still wanted");
        }
        let lull = moves.then(|| Lull::new(now));
        serving.beginning.insert(number, Beginning { copy, is_move: moves, lull });
        self.advance(now);
        self.begin_copies(now);
        Ok(welcome)
    }

    /// Sends images to copies that wait for one, once that can be. Nobody else is taken in until then.
    fn begin_copies(&mut self, now: Time) {
        let is_ready = |mode: &Mode| match mode {
            Mode::Serving(serving) => {
                let is_wanted = !serving.beginning.is_empty() && !serving.awaits_lull();
                is_wanted && serving.log.is_applied()
            }
            Mode::Spare(_) => false,
        };
        if let Mode::Serving(serving) = &mut self.mode {
            serving.look_for_lull(now, false);
        }
        if !is_ready(&self.mode) {
            return;
        }
        // Other copies see the same, by the log, and are waited for.
        while let Some(connection) = self.connections.first().copied() {
            // At once, since frames that wait refer to the shard's memory, and the shard may be on its way elsewhere.
            self.outputs.push_back(Output::Abandon { connection });
            self.handle_disconnected(now, connection, &Lost::Broken("the shard is copied".into()));
        }
        if self.shard().is_some_and(Shard::exceeds_image) {
            self.happen(now, Event::Imaged);
        }
        if !is_ready(&self.mode) {
            return;
        }
        let at = self.shifted(now);
        let Mode::Serving(serving) = &mut self.mode else { return };
        let image = serving.shard.image().encode();
        for (number, Beginning { copy, is_move, .. }) in std::mem::take(&mut serving.beginning) {
            let rests_until = is_move.then(|| now + limits::MOVE_REST);
            let next = serving.log.begin(number, copy, image.len(), rests_until);
            let pieces = image.len().div_ceil(limits::MAX_DATA_BYTES).max(1);
            for (piece, bytes) in image.chunks(limits::MAX_DATA_BYTES).enumerate() {
                let flags = if piece + 1 == pieces { Flags::LAST } else { Flags::default() };
                let header = Header {
                    flags,
                    clock: at.0,
                    request: next,
                    landing: self.config.process.0,
                    payload_bytes: bytes.len() as u32,
                    ..Header::new(Kind::Image)
                };
                let frame = Frame { header, body: Body::Bytes(bytes.to_vec()) };
                self.outputs.push_back(Output::send(NodeId::Spare(number), frame));
            }
        }
    }

    fn tell_coordinator(&mut self, message: &Control) {
        self.outputs.push_back(Output::send(NodeId::Coordinator, frame(Kind::Control, message)));
    }

    fn log(&mut self, line: String) {
        self.outputs.push_back(Output::Log(Level::Warn, line));
    }

    fn stop(&mut self, error: Option<String>) {
        if !std::mem::replace(&mut self.stopped, true) {
            self.outputs.push_back(Output::Stop { error });
        }
    }
}

/// The words of a copy that says hello.
#[derive(Debug, Clone, Copy)]
struct CopyHello {
    copy: CopyId,
    number: u32,
    shard: ShardId,
    has: Option<u64>,
    moves: bool,
}

impl Role for Replica {
    fn node(&self) -> Option<NodeId> {
        match &self.mode {
            Mode::Serving(serving) => serving.shard.node(),
            Mode::Spare(spare) => spare.number.map(NodeId::Spare),
        }
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        if let Party::Copy { copy, number, shard, has, moves } = hello.from
            && hello.job == self.config.job
        {
            return self.accept_copy(now, CopyHello { copy, number, shard, has, moves });
        }
        let Mode::Serving(serving) = &mut self.mode else {
            return Err(Refusal { reason: "this core serves no shard yet".into(), retry: true });
        };
        // A round that is to close needs all of its workers.
        if !serving.beginning.is_empty() && !serving.awaits_lull() {
            return Err(Refusal { reason: "the shard is about to be copied".into(), retry: true });
        }
        if serving.log.is_resting() {
            return Err(Refusal { reason: "the shard moves to another server".into(), retry: true });
        }
        let welcome = serving.shard.check_hello(hello)?;
        self.happen(now, Event::Accepted(hello.clone(), welcome.clone()));
        self.connections.insert(hello.connection(welcome.you));
        Ok(welcome)
    }

    fn hello(&self, connection: ConnectionId) -> Hello {
        let ShardConfig { job, process, core, cores, .. } = &self.config;
        let from = match &self.mode {
            Mode::Serving(serving) => return serving.shard.hello(connection),
            Mode::Spare(Spare { number: Some(number), copy: Some(copy), .. })
                if connection == copy.primary.connection() =>
            {
                let has = copy.shard.as_ref().map(|(_, has)| *has);
                let id = CopyId { process: *process, order: copy.order };
                Party::Copy { copy: id, number: *number, shard: copy.id, has, moves: copy.moves }
            }
            Mode::Spare(_) => Party::Shard { process: *process, server: None, core: *core, cores: *cores },
        };
        Hello { job: job.clone(), from, incarnation: process.0, to: None }
    }

    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome) {
        if let NodeId::Spare(number) = welcome.you
            && connection == NodeId::Coordinator.into()
        {
            return self.become_spare(now, number);
        }
        match &mut self.mode {
            Mode::Serving(serving) => {
                serving.coordinator.connected();
                serving.log.tell_again();
                self.happen(now, Event::Connected(connection, welcome.clone()));
                if let Mode::Serving(serving) = &self.mode
                    && !serving.log.is_applied()
                {
                    // The shard will hear of the connection, and register, when a copy has that; only the coordinator can say that this
                    // copy need not be waited for.
                    self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
                }
            }
            Mode::Spare(spare) => {
                if let Some(copy) = spare.copy.as_mut().filter(|copy| copy.primary.connection() == connection)
                {
                    copy.primary.connected();
                    (copy.told, copy.image) = (None, Vec::new());
                }
            }
        }
    }

    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost) {
        match (&mut self.mode, connection) {
            (Mode::Serving(serving), ConnectionId::Node(NodeId::Spare(number))) => {
                serving.beginning.remove(&number);
                serving.log.lose(number);
                self.advance(now);
                self.begin_copies(now);
            }
            (Mode::Serving(serving), ConnectionId::Node(NodeId::Coordinator)) => {
                serving.coordinator.disconnected(now, why);
                if why.is_final() {
                    serving.log.close();
                }
                self.happen(now, Event::Disconnected(connection, why.clone()));
            }
            (Mode::Serving(_), _) => self.happen(now, Event::Disconnected(connection, why.clone())),
            (Mode::Spare(spare), ConnectionId::Node(NodeId::Coordinator)) => {
                if why.is_final() {
                    return self.stop(Some(why.to_string()));
                }
                spare.coordinator.disconnected(now, why);
            }
            (Mode::Spare(spare), _) => {
                if let Some(copy) = spare.copy.as_mut().filter(|copy| copy.primary.connection() == connection)
                {
                    copy.primary.disconnected(now, why);
                }
            }
        }
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        let is_known = self.connections.contains(&connection);
        match (&mut self.mode, connection) {
            (Mode::Serving(serving), ConnectionId::Node(NodeId::Spare(number))) => {
                if header.kind == Kind::Entry {
                    serving.log.note(now, number, header.request);
                    self.advance(now);
                    self.begin_copies(now);
                }
            }
            // It was read before the driver heard that the connection ends. Its sender comes back.
            (Mode::Serving(_), _) if !is_known => {}
            (Mode::Serving(_), ConnectionId::Node(NodeId::Coordinator)) => {
                // A message that cannot be read is the shard's to complain of.
                let message = control::decode("control message", payload);
                if header.kind != Kind::Control
                    || message.is_err()
                    || message.is_ok_and(|message| self.hear_serving(now, &message))
                {
                    self.happen(now, Event::Frame(connection, *header, payload));
                }
                // It may have been said that a copy need not be waited for.
                self.begin_copies(now);
            }
            (Mode::Serving(_), _) => {
                self.happen(now, Event::Frame(connection, *header, payload));
                // It may have closed the round that a move waited for.
                self.begin_copies(now);
            }
            (Mode::Spare(_), ConnectionId::Node(NodeId::Coordinator)) => {
                match control::decode("control message", payload) {
                    Ok(message) => self.hear_spare(now, message),
                    Err(error) => self.log(error.to_string()),
                }
            }
            (Mode::Spare(spare), _) => {
                let primary = spare.copy.as_ref().map(|copy| copy.primary.connection());
                if primary != Some(connection) {
                    return;
                }
                if let Err(why) = self.hear_primary(header, payload) {
                    self.log(format!("gave up a copy: {why}"));
                    if let Mode::Spare(Spare { copy: Some(copy), .. }) = &mut self.mode {
                        (copy.shard, copy.image) = (None, Vec::new());
                    }
                    self.outputs.push_back(Output::Disconnect { connection });
                    let why = Lost::Broken("what came of a copy could not be used".into());
                    self.handle_disconnected(now, connection, &why);
                }
            }
        }
    }

    fn handle_archived(&mut self, now: Time, response: Response) {
        let at = self.shifted(now);
        match (&mut self.mode, response) {
            (Mode::Serving(_), Response::Written { folder, file }) => {
                self.happen(now, Event::Written(folder, file));
            }
            // A shard has no copies before it has read what its tables held.
            (Mode::Serving(serving), response) => serving.shard.handle_archived(at, response),
            // It was written for a shard that is served elsewhere by now.
            (Mode::Spare(_), _) => {}
        }
    }

    fn progress(&self, connection: ConnectionId) -> Option<u64> {
        self.shard()?.progress(connection)
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.stopped {
            return;
        }
        let at = self.shifted(now);
        match &mut self.mode {
            Mode::Serving(Serving { shard, coordinator, log, has_timeout, .. }) => {
                self.outputs.extend(coordinator.poll(now));
                if let Some(sentence) = coordinator.overdue(now) {
                    return self.stop(Some(sentence));
                }
                log.rouse(now);
                let is_due = shard.next_timeout().is_some_and(|due| due <= at);
                if log.is_empty() {
                    shard.handle_timeout(at);
                } else if is_due && !*has_timeout {
                    *has_timeout = true;
                    self.happen(now, Event::Timeout);
                } else {
                    self.advance(now);
                }
                self.begin_copies(now);
            }
            Mode::Spare(spare) => {
                self.outputs.extend(spare.coordinator.poll(now));
                let overdue = spare.coordinator.overdue(now);
                if let Some(copy) = spare.copy.as_mut().filter(|_| spare.number.is_some()) {
                    self.outputs.extend(copy.primary.poll(now));
                }
                // The coordinator has another use for this core, once the process that served the shard is gone.
                spare.copy = spare.copy.take().filter(|copy| copy.primary.overdue(now).is_none());
                if overdue.is_some() {
                    self.stop(overdue);
                }
            }
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.stopped {
            return None;
        }
        match &self.mode {
            Mode::Serving(serving) => {
                let Serving { shard, coordinator, log, has_timeout, beginning, .. } = serving;
                let own = shard.next_timeout().filter(|_| !*has_timeout);
                let own = own.map(|at| Time(at.0.saturating_add_signed(self.shift.saturating_neg())));
                // An image that waits for inputs alone needs no timer.
                let lull = beginning.values().filter_map(|copy| copy.lull);
                let moves = lull.map(|lull| lull.deadline(serving.rounds()));
                own.into_iter().chain(moves).chain(log.next_timeout()).chain(coordinator.next_timeout()).min()
            }
            Mode::Spare(spare) => {
                let copy = spare.copy.as_ref().filter(|_| spare.number.is_some());
                let primary = copy.and_then(|copy| copy.primary.next_timeout());
                spare.coordinator.next_timeout().into_iter().chain(primary).min()
            }
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        if !self.outputs.is_empty() {
            return self.outputs.pop_front();
        }
        match &mut self.mode {
            Mode::Serving(serving) => loop {
                let output = serving.shard.poll_output()?;
                if !is_own_business(&output) {
                    return Some(output);
                }
            },
            Mode::Spare(Spare { copy: Some(copy), .. }) => {
                let (_, has) = copy.shard.as_ref()?;
                if copy.told == Some(*has) || !copy.primary.is_up() {
                    return None;
                }
                copy.told = Some(*has);
                let header = Header { request: *has, ..Header::new(Kind::Entry) };
                let frame = Frame { header, body: Body::Empty };
                Some(Output::send(NodeId::Shard(copy.id), frame))
            }
            Mode::Spare(_) => None,
        }
    }

    fn backlog_bytes(&self) -> usize {
        self.outputs.bytes() + self.shard().map_or(0, Shard::backlog_bytes)
    }

    fn awaits_silence(&self) -> bool {
        let Mode::Serving(serving) = &self.mode else { return false };
        let mut lulls = serving.beginning.values().filter_map(|copy| copy.lull);
        lulls.any(|lull| lull.awaits_silence()) && serving.log.is_applied()
    }

    fn handle_silence(&mut self, now: Time) {
        if let Mode::Serving(serving) = &mut self.mode {
            serving.look_for_lull(now, true);
            self.begin_copies(now);
        }
    }

    fn refresh(&self, header: &mut Header) {
        if let Some(shard) = self.shard() {
            shard.refresh(header);
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match self.shard() {
            Some(shard) => shard.payload(body),
            // Last words to a peer that the shard had hung up on before it went elsewhere.
            None => match body {
                Body::Stored { len, .. } => &BLANK[..*len],
                body => body.bytes().unwrap_or_default(),
            },
        }
    }

    fn check(&self) -> Result<(), String> {
        self.outputs.check()?;
        match &self.mode {
            Mode::Serving(serving) => {
                serving.log.check()?;
                serving.shard.check()
            }
            Mode::Spare(_) => self.copy().map_or(Ok(()), Shard::check),
        }
    }
}
