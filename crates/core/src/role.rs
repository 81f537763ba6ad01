//! The one contract of all roles. A driver owns a role, brings it the world, and carries out what it says.
//!
//! The methods of [`Role`] come in seven families; a worker has an eighth, for its application.
//!
//! - *Events*: `accept`, `handle_listening`, `handle_connected`, `handle_disconnected`, `handle_frame`, `handle_archived` and
//!   `handle_timeout`.
//! - *Outputs*: `poll_output` and `next_timeout`. A driver drains `poll_output` after every batch of events.
//! - *Bytes out*: `payload` lends the bytes of a frame that is to be sent, so that gradients and parameters travel straight
//!   from where they live. A driver whose socket is full keeps the frame, not its bytes: it asks for the payload when it can
//!   send it, after `refresh` has brought the header up to date. The bytes of one frame are all taken between two events.
//! - *Bytes in*: `landing` says where payloads that are about to arrive belong, `handle_landed` that they are there.
//! - *Flow*: `progress` orders the connections that can be read, `backlog_bytes` is the memory of outputs not yet polled, and
//!   `handle_silence` says, to a role that awaits it, that they have left.
//! - *Invariants*: `check`.
//! - *Identity*: `node` and `hello`.

use crate::address::Addresses;
use crate::checkpoint;
use crate::landing::{Destination, Landing};
use crate::lease::Lease;
use crate::types::{Clock, ConnectionId, NodeId, TableId, Time};
use crate::wire::{Header, Hello, Refusal, Welcome};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;

/// A frame that a role wants sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Its header; `payload_bytes` is the body's length.
    pub header: Header,
    /// Its payload.
    pub body: Body,
}

impl Frame {
    /// Memory that was taken for this frame, or for it and a few others.
    pub fn memory_bytes(&self) -> usize {
        match &self.body {
            Body::Bytes(bytes) => size_of::<Frame>() + bytes.len(),
            // Others may have it too; who is last keeps it.
            Body::Counted(bytes) => size_of::<Frame>() + bytes.len(),
            Body::Logged(bytes) => size_of::<Frame>() + bytes.len(),
            Body::Empty | Body::Shared { .. } | Body::Stored { .. } => size_of::<Frame>(),
        }
    }
}

/// A frame's payload, or a reference to it.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// No payload.
    Empty,
    /// Made for this frame.
    Bytes(Vec<u8>),
    /// Made once for several frames.
    Counted(Arc<[u8]>),
    /// The same, of bytes that were gathered in a vector and are too many to be copied once more.
    Logged(Arc<Vec<u8>>),
    /// In memory that lives as long as the frame does, whatever becomes of the request that it belongs to.
    Shared {
        /// The memory.
        buffer: Lease,
        /// First byte in it.
        start: usize,
        /// Number of bytes.
        len: usize,
    },
    /// In the role's own memory; [`Role::payload`] finds it.
    Stored {
        /// Which of the role's buffers.
        buffer: u64,
        /// First byte in it.
        start: usize,
        /// Number of bytes.
        len: usize,
    },
}

impl Body {
    /// The bytes, unless they are in the role's own memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Body::Empty => Some(&[]),
            Body::Bytes(bytes) => Some(bytes),
            Body::Counted(bytes) => Some(bytes),
            Body::Logged(bytes) => Some(bytes),
            Body::Shared { buffer, start, len } => Some(&buffer.as_bytes()[*start..*start + *len]),
            Body::Stored { .. } => None,
        }
    }
}

/// The place of a table's frame among others that wait: forward passes need the tables first that were created first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Priority {
    /// The iteration that it belongs to. Frames of earlier ones are not overtaken.
    pub clock: Clock,
    /// The table. Frames of one table keep their order.
    pub table: TableId,
}

impl Priority {
    /// That of a frame about a table.
    pub fn of(header: &Header) -> Priority {
        Priority { clock: header.clock, table: header.table }
    }
}

/// Which frames that wait another one may overtake.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Turn {
    /// None.
    #[default]
    InOrder,
    /// Those that this lets it.
    Ranked(Priority),
    /// None, and the next such frame takes its place as long as it waits: it says how things are, and old news would fill a slow connection.
    Newest,
}

/// How much a line of the log matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The job goes as it should.
    Info,
    /// The job goes on, but something is not as it should be.
    Warn,
    /// Something that was asked for is not done.
    Error,
}

/// An instruction of a role to its driver.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Open a connection and say hello ([`Role::hello`]). The driver answers with `handle_connected` or
    /// `handle_disconnected`; it does not try again by itself.
    Connect {
        /// Its name.
        connection: ConnectionId,
        /// The peer's address: `host:port`, [`LOCAL`](crate::address::LOCAL) with a name, or a name of the in-memory transport.
        address: String,
    },
    /// Send a frame on a connection. If it does not stand, the frame is dropped: a role that needs it sent
    /// sends it again in `handle_connected`. A driver that has several frames waiting for a connection sends them in the order of
    /// a [`SendQueue`](crate::send_queue::SendQueue), or in that of the outputs.
    Send {
        /// The connection.
        to: ConnectionId,
        /// The frame.
        frame: Frame,
        /// Its place among frames that wait.
        turn: Turn,
    },
    /// Close a connection once everything before this is sent.
    Disconnect {
        /// The connection.
        connection: ConnectionId,
    },
    /// Close a connection at once: frames that wait on it are dropped, since what they refer to is gone.
    Abandon {
        /// The connection.
        connection: ConnectionId,
    },
    /// Take connections of others from now on. The driver answers with `handle_listening`.
    Listen,
    /// Start another data core in this process.
    StartCore,
    /// Store the role's state durably in place of the one before, and answer with `handle_remembered`. What the role says after this is
    /// to be said after it is stored, which the role sees to by itself.
    Remember {
        /// The state.
        state: Vec<u8>,
    },
    /// Ask the driver's archive of checkpoints for something. The driver answers with `handle_archived`, in the order of the
    /// requests; a write is answered when what was written survives the loss of power. It does this beside the role's events.
    Archive(Box<checkpoint::Request>),
    /// A line for the log.
    Log(Level, String),
    /// The role's work is done, well or badly; the driver may end.
    Stop {
        /// The reason of a failure.
        error: Option<String>,
    },
}

impl Output {
    /// Sends a frame that overtakes nothing.
    pub fn send(to: impl Into<ConnectionId>, frame: Frame) -> Output {
        Output::Send { to: to.into(), frame, turn: Turn::InOrder }
    }

    /// Sends a frame that makes the one before of its kind out of date.
    pub fn send_newest(to: impl Into<ConnectionId>, frame: Frame) -> Output {
        Output::Send { to: to.into(), frame, turn: Turn::Newest }
    }
}

/// Outputs that the driver has not polled yet, with a count of the memory that they hold.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    outputs: VecDeque<Output>,
    bytes: usize,
}

impl Outbox {
    pub(crate) fn push_back(&mut self, output: Output) {
        self.bytes += cost(&output);
        self.outputs.push_back(output);
    }

    pub(crate) fn extend(&mut self, outputs: impl IntoIterator<Item = Output>) {
        outputs.into_iter().for_each(|output| self.push_back(output));
    }

    pub(crate) fn pop_front(&mut self) -> Option<Output> {
        let output = self.outputs.pop_front()?;
        self.bytes -= cost(&output);
        Some(output)
    }

    /// Drops outputs that are not to be carried out any more.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&Output) -> bool) {
        self.outputs.retain(is_kept);
        self.bytes = self.outputs.iter().map(cost).sum();
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Compares the counted bytes with the outputs that wait.
    pub(crate) fn check(&self) -> Result<(), String> {
        let bytes: usize = self.outputs.iter().map(cost).sum();
        if bytes != self.bytes {
            return Err(format!("{bytes} bytes of outputs wait, and {} are counted", self.bytes));
        }
        Ok(())
    }
}

/// Memory that an output takes, but for what it shares with others.
fn cost(output: &Output) -> usize {
    let own = match output {
        Output::Send { frame, .. } => frame.memory_bytes(),
        Output::Log(_, line) => line.len(),
        Output::Remember { state } => state.len(),
        // What a checkpoint copied is the archive's from here on.
        Output::Connect { .. }
        | Output::Disconnect { .. }
        | Output::Abandon { .. }
        | Output::Listen
        | Output::StartCore
        | Output::Archive(_)
        | Output::Stop { .. } => 0,
    };
    size_of::<Output>() + own
}

/// The reason why a connection ended, or was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lost {
    /// The connection broke, or the peer did not answer; in the driver's words.
    Broken(String),
    /// The peer refused our hello.
    Refused(Refusal),
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Broken(why) => write!(f, "{why}"),
            Lost::Refused(refusal) => write!(f, "refused: {refusal}"),
        }
    }
}

impl Lost {
    /// Whether trying again cannot help.
    pub fn is_final(&self) -> bool {
        matches!(self, Lost::Refused(refusal) if !refusal.retry)
    }
}

/// A role: coordinator, shard of a server, aggregator, worker. Nine methods are required.
///
/// The same calls in the same order MUST give the same outputs. No bytes from a peer may make a role panic, or take more memory
/// than [`crate::limits`] allows.
pub trait Role {
    /// This node's name, once it is known.
    fn node(&self) -> Option<NodeId>;

    /// A peer connected and said hello. The answer names the peer, or refuses it with a reason that it is told. The connection
    /// of an accepted peer is called [`Hello::connection`].
    fn accept(&mut self, now: Time, hello: &Hello) -> Result<Welcome, Refusal>;

    /// Others reach this role at these addresses from now on, as it asked with [`Output::Listen`]; `None` when they cannot.
    fn handle_listening(&mut self, _now: Time, _addresses: Option<Addresses>) {}

    /// The state of the last [`Output::Remember`] is stored.
    fn handle_remembered(&mut self, _now: Time) {}

    /// The archive's answer to the oldest request that it has not answered ([`Output::Archive`]).
    fn handle_archived(&mut self, _now: Time, _response: checkpoint::Response) {}

    /// The first message on a connection that this role asked for.
    fn hello(&self, connection: ConnectionId) -> Hello;

    /// A connection that this role asked for stands.
    fn handle_connected(&mut self, now: Time, connection: ConnectionId, welcome: &Welcome);

    /// A connection ended or could not be made. What was sent on it may or may not have arrived.
    fn handle_disconnected(&mut self, now: Time, connection: ConnectionId, why: &Lost);

    /// A frame arrived. `payload` has exactly `header.payload_bytes` bytes.
    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]);

    /// Where payloads belong: that of a frame whose header has arrived, and those of up to `frames - 1` frames expected after
    /// it. Their places, ascending, are put into `places`. `None`, the default, when the payload goes through the driver's own
    /// buffer to [`Role::handle_frame`].
    ///
    /// A driver puts payloads there without the role, which others may use meanwhile. It gives the destination up before it
    /// calls [`Role::handle_landed`] for each frame that it put there, and soon: the role does without that memory until then. If
    /// other frames come than were expected, their bytes may be written to these places too: the role MUST NOT give memory
    /// whose contents are in use.
    ///
    /// An answer may be a difference to the one before it. A driver puts a payload once, and hands over what it could not put:
    /// a payload of a table MUST NOT be put before one of the same table that came earlier and waits for `handle_frame`.
    fn landing(
        &mut self,
        _connection: ConnectionId,
        _header: &Header,
        _frames: usize,
        _places: &mut Vec<Landing>,
    ) -> Option<Destination> {
        None
    }

    /// A frame arrived, and its payload was put to where [`Role::landing`] said.
    fn handle_landed(&mut self, _now: Time, _connection: ConnectionId, _header: &Header) {}

    /// Progress of a connection's peer in bytes, where a peer's bytes are of use only together with those of others. A driver
    /// reads from peers that are behind first. `None`, the default, where order does not matter.
    fn progress(&self, _connection: ConnectionId) -> Option<u64> {
        None
    }

    /// The time of [`Role::next_timeout`] has come. Calling it early does no harm.
    fn handle_timeout(&mut self, now: Time);

    /// When `handle_timeout` wants to be called.
    fn next_timeout(&self) -> Option<Time>;

    /// The next thing to do.
    fn poll_output(&mut self) -> Option<Output>;

    /// Bytes of memory in outputs that were not polled yet. A driver that has much to hand over polls in between, since
    /// one frame from a peer can ask for a whole table.
    fn backlog_bytes(&self) -> usize {
        0
    }

    /// Whether the role wants to be told when everything that it said has left.
    fn awaits_silence(&self) -> bool {
        false
    }

    /// Outputs are carried out, and no frame waits on any connection. A driver calls this once a role awaits it ([`Role::awaits_silence`])
    /// and it is so.
    fn handle_silence(&mut self, _now: Time) {}

    /// Brings the header of a frame that had to wait up to date with what its payload is now. Only frames whose bytes are in
    /// the role's own memory ([`Body::Stored`]) can have changed, and drivers ask for no others.
    fn refresh(&self, _header: &mut Header) {}

    /// Checks the invariants of the role's state: counts against what they count. The error is a sentence that names the
    /// one that does not hold. The simulator calls it after every event, and in worlds of 64 or more nodes after some of them.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// The bytes of a body. A role that stores bytes itself ([`Body::Stored`]) finds them here.
    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        body.bytes().expect("a role that stores nothing sends nothing that it stored")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Kind;

    /// A frame with a payload of so many bytes of its own.
    fn send(bytes: usize) -> Output {
        let frame = Frame { header: Header::new(Kind::Params), body: Body::Bytes(vec![0; bytes]) };
        Output::send(NodeId::Coordinator, frame)
    }

    #[test]
    fn outputs_that_wait_are_counted_with_the_bytes_that_were_made_for_them() {
        let mut outbox = Outbox::default();
        outbox.push_back(Output::Disconnect { connection: NodeId::Coordinator.into() });
        let small = outbox.bytes();
        assert_eq!(small, size_of::<Output>());
        outbox.extend([send(1000), Output::Log(Level::Info, "0123456789".into())]);
        assert_eq!(outbox.bytes(), 3 * small + size_of::<Frame>() + 1000 + 10);
        assert_eq!((outbox.is_empty(), outbox.check()), (false, Ok(())));
        (0..2).for_each(|_| _ = outbox.pop_front());
        assert_eq!((outbox.bytes(), outbox.check()), (small + 10, Ok(())));
        outbox.pop_front();
        assert_eq!((outbox.bytes(), outbox.is_empty(), outbox.pop_front()), (0, true, None));
        outbox.bytes = 1;
        assert!(outbox.check().is_err(), "a byte of nothing");
    }

    #[test]
    fn a_frame_costs_what_was_made_for_it_alone() {
        let cost = |body| Frame { header: Header::new(Kind::Params), body }.memory_bytes();
        let (own, stored) = (Body::Bytes(vec![0; 100]), Body::Stored { buffer: 0, start: 0, len: 100 });
        assert_eq!(
            [cost(own), cost(stored), cost(Body::Empty)],
            [100, 0, 0].map(|own| size_of::<Frame>() + own)
        );
    }

    #[test]
    fn only_a_refusal_for_good_is_final() {
        let refused = |retry| Lost::Refused(Refusal { reason: "no such job".into(), retry });
        let all = [Lost::Broken("reset".into()), refused(true), refused(false)];
        assert_eq!(all.each_ref().map(Lost::is_final), [false, false, true]);
        assert_eq!(all.map(|lost| lost.to_string())[..2], ["reset", "refused: no such job"]);
    }

    /// A role of which only what is required is known.
    struct Plain;

    impl Role for Plain {
        fn node(&self) -> Option<NodeId> {
            None
        }
        fn accept(&mut self, _now: Time, _hello: &Hello) -> Result<Welcome, Refusal> {
            unreachable!("nobody connects")
        }
        fn hello(&self, _connection: ConnectionId) -> Hello {
            unreachable!("it connects to nobody")
        }
        fn handle_connected(&mut self, _now: Time, _connection: ConnectionId, _welcome: &Welcome) {}
        fn handle_disconnected(&mut self, _now: Time, _connection: ConnectionId, _why: &Lost) {}
        fn handle_frame(&mut self, _now: Time, _connection: ConnectionId, _header: &Header, _payload: &[u8]) {
        }
        fn handle_timeout(&mut self, _now: Time) {}
        fn next_timeout(&self) -> Option<Time> {
            None
        }
        fn poll_output(&mut self) -> Option<Output> {
            None
        }
    }

    #[test]
    fn a_role_that_says_nothing_more_has_no_places_no_order_and_no_backlog() {
        let (mut role, mut header) = (Plain, Header::new(Kind::Params));
        let (peer, mut places) = (ConnectionId::from(NodeId::Coordinator), Vec::new());
        assert!(role.landing(peer, &header, 4, &mut places).is_none() && places.is_empty());
        assert_eq!((role.progress(peer), role.backlog_bytes(), role.check()), (None, 0, Ok(())));
        role.refresh(&mut header);
        assert_eq!((header, role.payload(&Body::Bytes(vec![1]))), (Header::new(Kind::Params), &[1][..]));
    }
}
