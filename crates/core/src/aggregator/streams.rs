//! The streams of one shard, as they pass through an aggregator.
//!
//! To its workers it is the shard, and to the shard it is one receiver, whatever the number of its workers: it subscribes to a
//! table's stream when one of them does. Frames are passed on as they come. It keeps the values that they make, so that who is late or
//! far behind gets them from here.

use super::uplink::{Out, Uplink};
use crate::codec::Codec;
use crate::limits;
use crate::role::{Body, Frame};
use crate::stream::{Replica, ReplicaChunks, Stream, Taken};
use crate::table::Layout;
use crate::types::{Clock, ConnectionId, ShardId, TableId, Time};
use crate::wire::control::frame;
use crate::wire::frame::Update;
use crate::wire::{Cause, Control, Fault, Header, Kind, Position};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A replica of one shard has one stream.
const ONLY: usize = 0;

/// The streams of a shard's tables.
#[derive(Debug)]
pub(super) struct Streams {
    shard: ShardId,
    /// Of the tables that are broadcast.
    codecs: BTreeMap<TableId, UpdateCodec>,
    /// Those that somebody has followed here.
    relays: BTreeMap<TableId, Relay>,
    /// Bytes of recent frames that each of them may keep.
    log_bytes: usize,
}

/// What makes a table's updates.
#[derive(Debug, Clone)]
pub(super) struct UpdateCodec {
    codec: Option<Arc<Codec>>,
    /// [`Plan::valid_from`](crate::wire::Plan::valid_from) of the table.
    valid_from: u32,
}

impl UpdateCodec {
    pub(super) fn new(answer: Codec, is_sparse: bool, valid_from: u32) -> UpdateCodec {
        let codec = if is_sparse { answer.of_rows() } else { answer };
        UpdateCodec { codec: (!codec.is_none()).then(|| Arc::new(codec)), valid_from }
    }
}

/// A table's stream.
#[derive(Debug)]
struct Relay {
    id: TableId,
    valid_from: u32,
    replica: Replica,
    stream: Stream,
    /// It comes from the shard, on the connection that stands.
    is_subscribed: bool,
    /// Something of it is missing: when all of it is asked for.
    gap: Option<Time>,
}

/// Sends to those who follow, and counts the bytes.
fn passing<'a>(out: &'a mut Out<'_>) -> impl FnMut(ConnectionId, Frame) + 'a {
    move |to, Frame { header, body }| {
        out.report.bytes_to_workers += u64::from(header.payload_bytes);
        out.send(to, header, body);
    }
}

impl Streams {
    pub(super) fn new(shard: ShardId, log_bytes: usize) -> Streams {
        Streams { shard, codecs: BTreeMap::new(), relays: BTreeMap::new(), log_bytes }
    }

    /// A table is broadcast, and its updates are made by this codec from now on.
    pub(super) fn set_codec(&mut self, id: TableId, codec: UpdateCodec, uplink: &Uplink, out: &mut Out<'_>) {
        let UpdateCodec { codec: known, valid_from } = codec.clone();
        if let Some(relay) = self.relays.get_mut(&id).filter(|relay| relay.valid_from != valid_from) {
            relay.valid_from = valid_from;
            relay.replica.set_codec(known);
            relay.stream.skip_to(relay.replica.version(ONLY));
            relay.restart(out);
            // What comes by the former codec is not read any more.
            relay.is_subscribed = false;
            relay.gap = None;
            relay.settle(self.shard, uplink, out);
        }
        self.codecs.insert(id, codec);
    }

    /// Takes what a worker, or an aggregator below, says of streams.
    pub(super) fn handle_follower<'a>(
        &mut self,
        now: Time,
        from: ConnectionId,
        message: Control,
        layout_of: impl Fn(TableId) -> Option<&'a Layout>,
        uplink: &Uplink,
        out: &mut Out<'_>,
    ) -> Result<(), Fault> {
        match message {
            Control::Subscribe { shard, positions, is_question } => {
                if shard != self.shard {
                    return Err(protocol(format!("{from} asks for streams of {shard} here")));
                }
                Position::check_order(&positions, from)?;
                for position in positions.iter().take(self.codecs.len()) {
                    let id = position.table;
                    let layout = layout_of(id).filter(|layout| !layout.chunks().is_empty());
                    let (Some(layout), Some(codec)) = (layout, self.codecs.get(&id)) else {
                        let what = format!("{from} asks for a stream of table {}, and there is none", id.0);
                        return Err(protocol(what));
                    };
                    let relay = self.relays.entry(id).or_insert_with(|| Relay::new(id, codec, layout));
                    relay.subscribe(from, *position, is_question, out);
                    relay.settle(self.shard, uplink, out);
                }
            }
            Control::Unsubscribe { tables, .. } => {
                for id in tables {
                    if let Some(relay) = self.relays.get_mut(&id) {
                        relay.stream.forget(from);
                        relay.settle(self.shard, uplink, out);
                    }
                }
            }
            Control::Seen { table, version, .. } => {
                if let Some(relay) = self.relays.get_mut(&table) {
                    relay.note_seen(now, from, version, out);
                }
            }
            other => return Err(protocol(format!("a `{}` message is not about streams", other.name()))),
        }
        Ok(())
    }

    /// A worker's connection is gone, or that of an aggregator below.
    pub(super) fn forget(&mut self, follower: ConnectionId, uplink: &Uplink, out: &mut Out<'_>) {
        for relay in self.relays.values_mut() {
            relay.stream.forget(follower);
            relay.settle(self.shard, uplink, out);
        }
    }

    /// The connection to the shard is gone: streams go on from where they are when somebody follows them again.
    pub(super) fn disconnected(&mut self) {
        for relay in self.relays.values_mut() {
            relay.is_subscribed = false;
            relay.gap = None;
        }
    }

    /// A frame of a version from the shard.
    pub(super) fn take_update(
        &mut self,
        now: Time,
        header: &Header,
        payload: &[u8],
        uplink: &Uplink,
        out: &mut Out<'_>,
    ) {
        let update = Update::decode(header);
        let Some(relay) = self.relays.get_mut(&update.table) else { return };
        out.report.bytes_from_servers += payload.len() as u64;
        if relay.valid_from == update.epoch {
            relay.take_update(now, update, payload, (self.shard, uplink), out);
            relay.stream.trim(self.log_bytes);
        }
    }

    /// Asks for all of the streams whose gaps were not closed.
    pub(super) fn handle_timeout(&mut self, now: Time, uplink: &Uplink, out: &mut Out<'_>) {
        for relay in self.relays.values_mut().filter(|relay| relay.gap.is_some_and(|due| due <= now)) {
            relay.gap = Some(now + limits::RESUBSCRIBE_AFTER);
            relay.replica.forget(ONLY);
            relay.ask(self.shard, uplink, out);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.relays.values().filter_map(|relay| relay.gap).min()
    }

    /// Bytes of the values that were broadcast, and of frames that may be sent again.
    pub(super) fn memory_bytes(&self) -> usize {
        let of_relay = |relay: &Relay| relay.replica.memory_bytes() + relay.stream.log_bytes();
        self.relays.values().map(of_relay).sum()
    }
}

impl Relay {
    fn new(id: TableId, codec: &UpdateCodec, layout: &Layout) -> Relay {
        let UpdateCodec { codec, valid_from } = codec;
        Relay {
            id,
            valid_from: *valid_from,
            replica: Replica::of_shard(layout, codec.clone()),
            stream: Stream::default(),
            is_subscribed: false,
            gap: None,
        }
    }

    /// The sending end, and what it sends from.
    fn parts(&mut self) -> (&mut Stream, ReplicaChunks<'_>) {
        let Relay { id, valid_from, replica, stream, .. } = self;
        (stream, ReplicaChunks { id: *id, epoch: *valid_from, replica, stream: ONLY })
    }

    fn subscribe(&mut self, to: ConnectionId, position: Position, is_question: bool, out: &mut Out<'_>) {
        let (stream, chunks) = self.parts();
        if !is_question || stream.is_beyond(&position) {
            stream.subscribe(to, position, &chunks, &mut passing(out));
        }
    }

    fn note_seen(&mut self, now: Time, from: ConnectionId, version: Clock, out: &mut Out<'_>) {
        let (stream, chunks) = self.parts();
        stream.note_seen(now, from, version, &chunks, &mut passing(out));
    }

    fn restart(&mut self, out: &mut Out<'_>) {
        let (stream, chunks) = self.parts();
        stream.restart(&chunks, &mut passing(out));
    }

    /// Follows the shard as long as somebody follows here.
    fn settle(&mut self, shard: ShardId, uplink: &Uplink, out: &mut Out<'_>) {
        let is_wanted = self.stream.is_followed();
        if is_wanted == self.is_subscribed || !uplink.link.is_up() {
            return;
        }
        self.is_subscribed = is_wanted;
        if is_wanted {
            self.ask(shard, uplink, out);
        } else {
            self.gap = None;
            say(uplink, &Control::Unsubscribe { shard, tables: vec![self.id] }, out);
        }
    }

    /// Asks the shard for what follows what is whole here.
    fn ask(&mut self, shard: ShardId, uplink: &Uplink, out: &mut Out<'_>) {
        let position =
            Position { table: self.id, epoch: self.valid_from, version: self.replica.version(ONLY) };
        let positions = vec![position];
        say(uplink, &Control::Subscribe { shard, positions, is_question: false }, out);
    }

    fn take_update(
        &mut self,
        now: Time,
        update: Update,
        payload: &[u8],
        (shard, uplink): (ShardId, &Uplink),
        out: &mut Out<'_>,
    ) {
        let before = self.replica.version(ONLY);
        let taken = self.replica.take(ONLY, &update, payload);
        let version = self.replica.version(ONLY);
        match taken {
            Taken::Applied => self.pass_on(now, update, payload, out),
            // The end of a version matters, whatever brought its chunks.
            Taken::Known if version > before => self.pass_on(now, update, payload, out),
            Taken::Known => self.stream.note_known(&update),
            Taken::Missing if self.gap.is_none() && self.is_subscribed => {
                self.gap = Some(now + limits::RESUBSCRIBE_AFTER);
                self.ask(shard, uplink, out);
            }
            Taken::Missing => {}
            Taken::Differs => {
                // Each of those behind this aggregator compares for itself.
                self.pass_on(now, update, payload, out);
                self.replica.forget(ONLY);
                let (table, version) = (self.id.0, update.round);
                out.log(format!(
                    "table {table} is not what {shard} broadcast as version {version}; it is fetched anew"
                ));
                self.ask(shard, uplink, out);
            }
        }
        if let Some(version) = version.filter(|_| version > before) {
            self.gap = None;
            say(uplink, &Control::Seen { shard, table: self.id, version }, out);
        }
    }

    /// Passes a frame on as it is.
    fn pass_on(&mut self, now: Time, update: Update, payload: &[u8], out: &mut Out<'_>) {
        let body = Body::Counted(payload.into());
        self.stream.publish(now, update, &body, payload.len(), &mut passing(out));
    }
}

fn say(uplink: &Uplink, message: &Control, out: &mut Out<'_>) {
    let Frame { header, body } = frame(Kind::Control, message);
    out.send(uplink.connection(), header, body);
}

fn protocol(message: String) -> Fault {
    Fault { cause: Cause::Protocol, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::role::{Outbox, Output};
    use crate::status::AggregatorReport;
    use crate::stream::Digest;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{NodeId, ServerId, WorkerId};
    use crate::wire::control;
    use crate::wire::frame::{Form, Piece};

    const SHARD: ShardId = ShardId { server: ServerId(1), core: 0 };
    const TABLE: TableId = TableId(0);
    const FOLLOWER: ConnectionId = ConnectionId::WorkerFor(WorkerId(3), SHARD);

    struct Bench {
        streams: Streams,
        uplink: Uplink,
        layout: Layout,
        outputs: Outbox,
        report: AggregatorReport,
        now: Time,
    }

    /// What was said to the shard, how many frames went to the follower, and how many lines to the log.
    type Said = (Vec<Control>, usize, usize);

    impl Bench {
        /// The shard has chunks 4 and 6 of a table, of two elements each.
        fn new(codec: &str) -> Bench {
            let chunk = |number: u32| (number, Chunk { shard: SHARD, start: u64::from(number) * 2, len: 2 });
            let connection = NodeId::Shard(SHARD).into();
            let mut link = Link::new(Time::ZERO, connection, "shard:1".to_owned());
            link.connected();
            let mut bench = Bench {
                streams: Streams::new(SHARD, usize::MAX),
                uplink: Uplink::new(SHARD, connection, link, 1),
                layout: Layout::new(TableSpec::dense("w", [100]), [4, 6].map(chunk).into_iter()),
                outputs: Outbox::default(),
                report: AggregatorReport::default(),
                now: Time::ZERO,
            };
            let registry = crate::registry::Registry::builtin();
            let codec = Codec::for_answers(&registry.codec, codec).unwrap();
            bench.act(|streams, uplink, out| {
                streams.set_codec(TABLE, UpdateCodec::new(codec, false, 1), uplink, out);
            });
            bench
        }

        fn act(&mut self, act: impl FnOnce(&mut Streams, &Uplink, &mut Out<'_>)) -> Said {
            let mut out = Out { outputs: &mut self.outputs, report: &mut self.report };
            act(&mut self.streams, &self.uplink, &mut out);
            let (mut said, mut passed, mut lines) = (Vec::new(), 0, 0);
            while let Some(output) = self.outputs.pop_front() {
                match output {
                    Output::Send { to: FOLLOWER, .. } => passed += 1,
                    Output::Send { frame, .. } => {
                        said.push(control::decode("message", frame.body.bytes().unwrap()).unwrap());
                    }
                    _ => lines += 1,
                }
            }
            (said, passed, lines)
        }

        fn say(&mut self, message: Control) -> (Result<(), Fault>, Said) {
            let (now, layout) = (self.now, std::mem::replace(&mut self.layout, empty()));
            let mut result = Ok(());
            let said = self.act(|streams, uplink, out| {
                let layout_of = |id: TableId| (id.0 < 2).then_some(&layout);
                result = streams.handle_follower(now, FOLLOWER, message, layout_of, uplink, out);
            });
            self.layout = layout;
            (result, said)
        }

        fn subscribe(&mut self, shard: ShardId, table: TableId) -> (Result<(), Fault>, Said) {
            let positions = vec![Position { table, epoch: 1, version: None }];
            self.say(Control::Subscribe { shard, positions, is_question: false })
        }

        fn take(&mut self, place: u32, version: Clock, form: Form, payload: &[u8], digest: u64) -> Said {
            let piece = Piece { chunk: [4, 6][place as usize], sequence: place, is_last: place == 1 };
            let update =
                Update { epoch: 1, table: TABLE, round: version, version, piece, form, digest, delay: None };
            let (now, header) = (self.now, update.header(payload.len()));
            self.act(|streams, uplink, out| streams.take_update(now, &header, payload, uplink, out))
        }

        fn take_values(&mut self, place: u32, version: Clock, digest: u64) -> Said {
            let values = [version as f32; 2];
            self.take(place, version, Form::PLAIN, bytemuck::cast_slice(&values), digest)
        }
    }

    fn empty() -> Layout {
        Layout::new(TableSpec::dense("w", [1]), std::iter::empty())
    }

    fn asked(version: Option<Clock>) -> Control {
        let positions = vec![Position { table: TABLE, epoch: 1, version }];
        Control::Subscribe { shard: SHARD, positions, is_question: false }
    }

    fn seen(version: Clock) -> Control {
        Control::Seen { shard: SHARD, table: TABLE, version }
    }

    #[test]
    fn a_stream_is_followed_while_somebody_follows_it() {
        let mut bench = Bench::new("none");
        assert_eq!(bench.subscribe(SHARD, TABLE), (Ok(()), (vec![asked(None)], 0, 0)));
        assert_eq!(bench.take_values(0, 0, 0), (vec![], 1, 0));
        assert_eq!(bench.take_values(1, 0, 0), (vec![seen(0)], 1, 0));
        assert_eq!((bench.report.bytes_from_servers, bench.report.bytes_to_workers), (16, 16));
        assert!(bench.streams.memory_bytes() >= 16);
        let left = bench.say(Control::Unsubscribe { shard: SHARD, tables: vec![TABLE] });
        let unsubscribed = Control::Unsubscribe { shard: SHARD, tables: vec![TABLE] };
        assert_eq!(left, (Ok(()), (vec![unsubscribed], 0, 0)));
        // What is on its way is kept, and it goes on from there.
        bench.take_values(0, 1, 0);
        assert_eq!(bench.take_values(1, 1, 0).1, 0);
        assert_eq!(bench.subscribe(SHARD, TABLE), (Ok(()), (vec![asked(Some(1))], 2, 0)));
        // One that breaks off says nothing to a shard that is not there.
        bench.streams.disconnected();
        bench.uplink.link.disconnected(Time::ZERO, &crate::role::Lost::Broken("reset".into()));
        let lost = bench.act(|streams, uplink, out| streams.forget(FOLLOWER, uplink, out));
        assert_eq!(lost, (vec![], 0, 0));
    }

    #[test]
    fn values_that_differ_are_fetched_anew_and_everybody_compares_for_itself() {
        let mut bench = Bench::new("none");
        bench.subscribe(SHARD, TABLE).0.unwrap();
        bench.take_values(0, 0, 0);
        let mut digest = Digest::new();
        (0..2).for_each(|_| digest.take(Digest::of_chunk(&[0.0; 2])));
        let digest = digest.finish();
        assert_eq!(bench.take_values(1, 0, digest ^ 1), (vec![asked(None)], 1, 1));
        assert_eq!(bench.take_values(0, 0, 0), (vec![], 1, 0));
        assert_eq!(bench.take_values(1, 0, digest), (vec![seen(0)], 1, 0));
    }

    #[test]
    fn a_gap_that_is_not_closed_is_asked_for_from_the_beginning() {
        let mut bench = Bench::new("topk:0.5");
        bench.subscribe(SHARD, TABLE).0.unwrap();
        (0..2).for_each(|place| drop(bench.take_values(place, 0, 0)));
        // Version 1 is missing.
        assert_eq!(bench.take(0, 2, Form::Encoded, &[0; 8], 0), (vec![asked(Some(0))], 0, 0));
        assert_eq!(bench.take(1, 2, Form::Encoded, &[0; 8], 0), (vec![], 0, 0), "once");
        let due = bench.streams.next_timeout().expect("it is watched");
        let on_time = bench.act(|streams, uplink, out| streams.handle_timeout(due, uplink, out));
        assert_eq!(on_time, (vec![asked(None)], 0, 0));
        (0..2).for_each(|place| drop(bench.take_values(place, 3, 0)));
        assert_eq!(bench.streams.next_timeout(), None);
    }

    #[test]
    fn streams_that_are_not_here_are_refused() {
        let mut bench = Bench::new("none");
        let elsewhere = ShardId { core: 1, ..SHARD };
        for (shard, table) in [(elsewhere, TABLE), (SHARD, TableId(1)), (SHARD, TableId(7))] {
            let (result, said) = bench.subscribe(shard, table);
            assert_eq!(result.map_err(|fault| fault.cause), Err(Cause::Protocol));
            assert_eq!(said, (vec![], 0, 0));
        }
        assert_eq!(bench.streams.memory_bytes(), 0);
    }
}
