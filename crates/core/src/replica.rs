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

mod entry;
mod log;

use crate::checkpoint::Response;
use crate::limits;
use crate::link::Link;
use crate::registry::Registry;
use crate::role::{Body, Frame, Level, Lost, Outbox, Output, Role};
use crate::server::{Shard, ShardConfig, ShardImage};
use crate::types::{ConnectionId, NodeId, ProcessId, ShardId, Time};
use crate::wire::control::{self, frame};
use crate::wire::{Change, Control, Flags, Header, Hello, Kind, Party, Plan, Refusal, ServedShard, Welcome};
use entry::Event;
use log::Log;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    /// In place of chunks that are not here any more.
    blank: Vec<u8>,
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
    beginning: BTreeMap<u32, ProcessId>,
}

/// A core that serves nothing.
#[derive(Debug)]
struct Spare {
    number: Option<u32>,
    coordinator: Link,
    copy: Option<CopyOf>,
    /// The shard that was served here before, for frames of it that still wait to be sent.
    former: Option<Former>,
}

/// A shard that is served elsewhere now.
#[derive(Debug)]
struct Former {
    shard: Box<Shard>,
    /// Its frames have left by then, or never will.
    until: Time,
}

/// A copy of a shard, as far as it is here.
#[derive(Debug)]
struct CopyOf {
    id: ShardId,
    /// To the process that serves it.
    primary: Link,
    /// That process, once the image is here.
    writer: ProcessId,
    /// What has come of the image.
    image: Vec<u8>,
    /// The shard, once its image is here, and how many entries of the log it has.
    shard: Option<(Box<Shard>, u64)>,
    /// The time of the last entry.
    time: Time,
    /// The process that serves the shard was told of so many entries.
    told: Option<u64>,
}

impl Replica {
    /// A data core that is about to join: as one of those that a job begins with, unless the coordinator has another use for it.
    pub fn new(now: Time, config: ShardConfig, registry: Arc<Registry>) -> Replica {
        let shard = Shard::new(now, config.clone(), registry.clone());
        Replica::serving(now, shard, config, registry)
    }

    /// A data core that serves this shard.
    pub fn serving(now: Time, shard: Shard, config: ShardConfig, registry: Arc<Registry>) -> Replica {
        let coordinator = Link::new(now, NodeId::Coordinator, config.coordinator.clone());
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
            }),
            shift: 0,
            connections: BTreeSet::new(),
            blank: Vec::new(),
            outputs: Outbox::default(),
            stopped: false,
        }
    }

    /// The process that this core belongs to.
    pub fn process(&self) -> ProcessId {
        self.config.process
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
        match &event {
            Event::Accepted(hello, _) => {
                if let Some(caller) = hello.caller() {
                    self.connections.insert(hello.connection(caller));
                }
            }
            Event::Connected(connection, _) => drop(self.connections.insert(*connection)),
            Event::Disconnected(connection, _) => drop(self.connections.remove(connection)),
            Event::Frame(..) | Event::Timeout | Event::Written(..) => {}
        }
        let at = self.shifted(now);
        let Mode::Serving(serving) = &mut self.mode else { return };
        if serving.log.is_empty() {
            return event.apply(at, &mut serving.shard);
        }
        for (copy, frame) in serving.log.append(now, event.encode(at)) {
            self.outputs.push_back(Output::send(NodeId::Spare(copy), frame));
        }
        self.advance(now);
    }

    /// Applies the inputs that copies have, and tells the coordinator what is new about them.
    fn advance(&mut self, now: Time) {
        let Mode::Serving(Serving { shard, log, epoch, has_timeout, .. }) = &mut self.mode else { return };
        while let Some(entry) = log.take_ready() {
            let (at, event) = Event::decode(&entry).expect("this process wrote it");
            if matches!(event, Event::Timeout) {
                *has_timeout = false;
            }
            event.apply(at, shard);
        }
        while let Some(process) = log.poll_in_sync(*epoch) {
            let message = Control::Copied { process, epoch: *epoch };
            self.outputs.push_back(Output::send(NodeId::Coordinator, frame(Kind::Control, &message)));
        }
        while let Some(process) = log.poll_lost(now) {
            let message = Control::CopyLost { process };
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
                    Some(ServedShard { process, .. }) if *process != own && known > 0 => {
                        self.retire(now);
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
                if let Change::Served { shard, process, copy, .. } = change
                    && Some(*shard) == id
                {
                    if *process != own {
                        self.retire(now);
                        return false;
                    }
                    self.keep(*copy, *epoch);
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
    fn keep(&mut self, copy: Option<ProcessId>, since: u32) {
        let Mode::Serving(serving) = &mut self.mode else { return };
        for number in serving.log.keep(copy, since) {
            self.outputs.push_back(Output::Disconnect { connection: NodeId::Spare(number).into() });
        }
    }

    /// The shard is served by another process: this core has nothing to say about it any more.
    fn retire(&mut self, now: Time) {
        let Mode::Serving(Serving { coordinator, .. }) = &self.mode else { return };
        let coordinator = coordinator.anew(now);
        let spare = Spare { number: None, coordinator, copy: None, former: None };
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
        for connection in std::mem::take(&mut self.connections).into_iter().chain(copies) {
            self.outputs.push_back(Output::Disconnect { connection });
        }
        self.outputs.push_back(Output::Disconnect { connection: NodeId::Coordinator.into() });
        self.outputs.push_back(Output::Log(Level::Info, line));
        self.shift = 0;
        self.config.server = None;
        if let Mode::Spare(spare) = &mut self.mode {
            spare.former = Some(Former { shard: serving.shard, until: now + limits::LAST_FRAMES });
        }
    }

    /// The coordinator has given this core, which said hello as one that a job begins with, a number among the spare ones.
    fn become_spare(&mut self, now: Time, number: u32) {
        if let Mode::Serving(serving) = &self.mode {
            if serving.shard.epoch() > 0 {
                // Everything else begins anew, with a connection of its own to the coordinator.
                return self.retire(now);
            }
            self.config.server = None;
            let coordinator = Link::new(now, NodeId::Coordinator, self.config.coordinator.clone());
            self.mode = Mode::Spare(Spare { number: None, coordinator, copy: None, former: None });
        }
        let Mode::Spare(spare) = &mut self.mode else { return };
        let is_same = spare.number.replace(number) == Some(number);
        spare.coordinator.connected();
        // A copy is known by its number to the process that serves the shard.
        if let Some(copy) = spare.copy.take_if(|_| !is_same) {
            self.outputs.push_back(Output::Disconnect { connection: copy.primary.connection() });
        }
        let kept = spare.copy.as_ref().filter(|copy| copy.shard.is_some()).map(|copy| copy.id);
        if let Some(shard) = kept {
            self.tell_coordinator(&Control::Kept { shard });
        }
        self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
    }

    fn hear_spare(&mut self, now: Time, message: Control) {
        let Mode::Spare(spare) = &mut self.mode else { return };
        match message {
            Control::Keep { shard: id, from } => {
                if let Some(copy) = spare.copy.take() {
                    self.outputs.push_back(Output::Disconnect { connection: copy.primary.connection() });
                }
                let primary = Link::new(now, NodeId::Shard(id), from);
                let (image, shard) = (Vec::new(), None);
                let copy =
                    CopyOf { id, primary, writer: ProcessId(0), image, shard, time: Time::ZERO, told: None };
                spare.copy = Some(copy);
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
        let Some(CopyOf { id, shard: Some((mut shard, _)), time, primary, .. }) = spare.copy.take() else {
            return self.log("was asked to serve a shard of which no copy is here".into());
        };
        for connection in [primary.connection(), NodeId::Coordinator.into()] {
            self.outputs.push_back(Output::Disconnect { connection });
        }
        self.shift = i64::try_from(i128::from(time.0) - i128::from(now.0)).unwrap_or(0);
        // The core's own number stays: it tells the spare cores of a process apart.
        let config = ShardConfig { server: Some(id.server), core: id.core, ..self.config.clone() };
        let why = Lost::Broken(format!("{id} is served by another process"));
        let mut connections = std::mem::take(&mut self.connections);
        connections.insert(NodeId::Coordinator.into());
        connections.into_iter().for_each(|connection| shard.handle_disconnected(time, connection, &why));
        discard(&mut shard);
        let epoch = plan.epoch;
        shard.take_over(time, config, plan);
        self.outputs.push_back(Output::Log(Level::Info, format!("serves {id} from now on")));
        // Whoever gets frames of the former shard has them by now, or blanks.
        self.blank = vec![0; limits::MAX_DATA_BYTES];
        shard.set_patience(coordinator.patience());
        self.mode = Mode::Serving(Serving {
            shard,
            coordinator: coordinator.anew(now),
            log: Log::of_epoch(epoch),
            epoch,
            has_timeout: false,
            beginning: BTreeMap::new(),
        });
    }

    /// What the process that serves a shard sends to a copy.
    fn hear_primary(&mut self, header: &Header, payload: &[u8]) -> Result<(), String> {
        let Replica { config, registry, mode, connections, .. } = self;
        let Mode::Spare(Spare { copy: Some(copy), coordinator, .. }) = mode else { return Ok(()) };
        match header.kind {
            Kind::Image => {
                copy.image.extend_from_slice(payload);
                if header.flags.has(Flags::LAST) {
                    let image = ShardImage::decode(&std::mem::take(&mut copy.image))?;
                    let config =
                        ShardConfig { server: Some(copy.id.server), core: copy.id.core, ..config.clone() };
                    (copy.time, copy.writer) = (Time(header.clock), ProcessId(header.landing));
                    let mut shard = Shard::from_image(copy.time, config, registry.clone(), image)?;
                    shard.set_patience(coordinator.patience());
                    connections.clear();
                    copy.shard = Some((Box::new(shard), header.request));
                    copy.told = None;
                }
            }
            Kind::Entry => {
                let Some((shard, has)) = &mut copy.shard else { return Ok(()) };
                if header.request != *has {
                    return Err(format!("entry {} came where {has} was due", header.request));
                }
                let (at, event) = Event::decode(payload)?;
                *has += 1;
                copy.time = at;
                match &event {
                    Event::Accepted(hello, _) => {
                        let name = hello.caller().map(|caller| hello.connection(caller));
                        connections.extend(name);
                    }
                    Event::Connected(connection, _) => drop(connections.insert(*connection)),
                    Event::Disconnected(connection, _) => drop(connections.remove(connection)),
                    Event::Frame(..) | Event::Timeout | Event::Written(..) => {}
                }
                event.apply(at, shard);
                discard(shard);
            }
            kind => return Err(format!("a copy does not take {kind:?} frames")),
        }
        Ok(())
    }

    /// A copy connects. One that lacks what is not in the log any more begins with an image, for which all other connections end: the
    /// shard and its copy are the same from then on.
    fn accept_copy(&mut self, now: Time, party: CopyHello) -> Result<Welcome, Refusal> {
        let refuse = |reason: &str| Err(Refusal { reason: reason.into(), retry: true });
        let CopyHello { process, number, shard, has } = party;
        let Mode::Serving(serving) = &mut self.mode else { return refuse("this core serves no shard") };
        if serving.shard.id() != Some(shard) || serving.shard.epoch() == 0 {
            return refuse("this core does not serve that shard");
        }
        let to = ConnectionId::from(NodeId::Spare(number));
        let welcome = Welcome { you: NodeId::Spare(number), incarnation: process.0, session: 0 };
        if let Some(has) = has.filter(|has| serving.log.can_resume(number, process, *has)) {
            for frame in serving.log.resume(now, number, has) {
                self.outputs.push_back(Output::Send { to, frame, priority: None });
            }
            return Ok(welcome);
        }
        serving.beginning.insert(number, process);
        self.begin_copies(now);
        Ok(welcome)
    }

    /// Sends images to copies that wait for one, once that can be. Nobody else is taken in until then.
    fn begin_copies(&mut self, now: Time) {
        let is_ready = |mode: &Mode| match mode {
            Mode::Serving(serving) => !serving.beginning.is_empty() && serving.log.is_applied(),
            Mode::Spare(_) => false,
        };
        if !is_ready(&self.mode) {
            return;
        }
        // Other copies see the same, by the log, and are waited for.
        while let Some(connection) = self.connections.first().copied() {
            self.outputs.push_back(Output::Disconnect { connection });
            self.handle_disconnected(now, connection, &Lost::Broken("the shard is copied".into()));
        }
        if !is_ready(&self.mode) {
            return;
        }
        let at = self.shifted(now);
        let Mode::Serving(serving) = &mut self.mode else { return };
        let image = serving.shard.image().encode();
        for (number, process) in std::mem::take(&mut serving.beginning) {
            let next = serving.log.begin(number, process);
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
    process: ProcessId,
    number: u32,
    shard: ShardId,
    has: Option<u64>,
}

/// A copy says nothing to anybody.
fn discard(shard: &mut Shard) {
    while shard.poll_output().is_some() {}
}

impl Role for Replica {
    fn node(&self) -> Option<NodeId> {
        match &self.mode {
            Mode::Serving(serving) => serving.shard.node(),
            Mode::Spare(spare) => spare.number.map(NodeId::Spare),
        }
    }

    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        if let Party::Copy { process, number, shard, has } = hello.from
            && hello.job == self.config.job
        {
            return self.accept_copy(now, CopyHello { process, number, shard, has });
        }
        let Mode::Serving(serving) = &mut self.mode else {
            return Err(Refusal { reason: "this core serves no shard yet".into(), retry: true });
        };
        if !serving.beginning.is_empty() {
            return Err(Refusal { reason: "the shard is about to be copied".into(), retry: true });
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
                Party::Copy { process: *process, number: *number, shard: copy.id, has }
            }
            Mode::Spare(_) => Party::Shard { process: *process, server: None, core: *core, cores: *cores },
        };
        Hello { job: job.clone(), from, incarnation: process.0 }
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
                if !serving.log.is_applied() {
                    // The shard says so too, once it hears of the connection.
                    self.tell_coordinator(&Control::Register { addresses: self.config.addresses.clone() });
                }
                self.happen(now, Event::Connected(connection, welcome.clone()));
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
            }
            (Mode::Serving(_), _) => self.happen(now, Event::Frame(connection, *header, payload)),
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
                if spare.former.take_if(|former| former.until <= now).is_some() {
                    self.blank = vec![0; limits::MAX_DATA_BYTES];
                }
                if let Some(copy) = &mut spare.copy {
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
            Mode::Serving(Serving { shard, coordinator, log, has_timeout, .. }) => {
                let own = shard.next_timeout().filter(|_| !*has_timeout);
                let own = own.map(|at| Time(at.0.saturating_add_signed(self.shift.saturating_neg())));
                own.into_iter().chain(log.next_timeout()).chain(coordinator.next_timeout()).min()
            }
            Mode::Spare(spare) => {
                let primary = spare.copy.as_ref().and_then(|copy| copy.primary.next_timeout());
                let former = spare.former.as_ref().map(|former| former.until);
                spare.coordinator.next_timeout().into_iter().chain(primary).chain(former).min()
            }
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        if !self.outputs.is_empty() {
            return self.outputs.pop_front();
        }
        match &mut self.mode {
            Mode::Serving(serving) => loop {
                match serving.shard.poll_output()? {
                    Output::Connect { connection: ConnectionId::Node(NodeId::Coordinator), .. } => {}
                    output => return Some(output),
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

    fn refresh(&self, header: &mut Header) {
        if let Some(shard) = self.shard() {
            shard.refresh(header);
        }
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        let former = match &self.mode {
            Mode::Serving(serving) => Some(&serving.shard),
            Mode::Spare(spare) => spare.former.as_ref().map(|former| &former.shard),
        };
        match (former, body) {
            (Some(shard), body) => shard.payload(body),
            (None, Body::Stored { len, .. }) => &self.blank[..*len],
            (None, body) => body.bytes().unwrap_or_default(),
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
