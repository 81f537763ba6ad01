use super::*;
use crate::codec::Encoder;
use crate::policy::{Axis, Policy};
use crate::registry::Registry;
use crate::types::{NodeId, TableId, WorkerId};
use crate::wire::frame::{Form, Piece};

const CHUNKS: usize = 3;
const ELEMENTS: usize = 4;

/// Chunks whose values are their versions.
struct Values {
    epoch: u32,
    versions: [Option<Clock>; CHUNKS],
}

impl Chunks for Values {
    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn count(&self) -> usize {
        CHUNKS
    }

    fn version(&self, index: usize) -> Option<Clock> {
        self.versions[index]
    }

    fn frame(&self, index: usize, round: Clock) -> Option<Frame> {
        let version = self.versions[index]?;
        let update = Update { version, epoch: self.epoch, ..update(index, round) };
        let values = [version as f32; ELEMENTS];
        let body = Body::Bytes(bytemuck::cast_slice(&values).to_vec());
        Some(Frame { header: update.header(4 * ELEMENTS), body })
    }
}

fn update(index: usize, round: Clock) -> Update {
    Update {
        epoch: 1,
        table: TableId(0),
        round,
        version: round,
        piece: Piece { chunk: index as u32, sequence: index as u32, is_last: index + 1 == CHUNKS },
        form: Form::PLAIN,
        digest: 0,
        delay: None,
    }
}

fn worker(rank: u32) -> ConnectionId {
    NodeId::Worker(WorkerId(rank)).into()
}

fn position(epoch: u32, version: Option<Clock>) -> Position {
    Position { table: TableId(0), epoch, version }
}

/// What a stream sends: to whom, which version and chunk, and whether a codec made it.
type Sent = Vec<(ConnectionId, Clock, u32, bool)>;

/// A stream with the chunks that it is about.
struct Bench {
    stream: Stream,
    chunks: Values,
    sent: Sent,
}

impl Bench {
    fn new() -> Bench {
        let chunks = Values { epoch: 1, versions: [None; CHUNKS] };
        Bench { stream: Stream::default(), chunks, sent: Vec::new() }
    }

    fn act(&mut self, act: impl FnOnce(&mut Stream, &Values, &mut dyn FnMut(ConnectionId, Frame))) -> Sent {
        let Bench { stream, chunks, sent } = self;
        act(stream, chunks, &mut |to, frame| {
            let header = frame.header;
            let is_encoded = header.flags.has(crate::wire::Flags::ENCODED);
            sent.push((to, header.clock, header.chunk, is_encoded));
        });
        std::mem::take(sent)
    }

    fn publish(&mut self, index: usize, round: Clock, is_encoded: bool) -> Sent {
        self.chunks.versions[index] = Some(round);
        let form = if is_encoded { Form::Encoded } else { Form::PLAIN };
        let body = Body::Counted(vec![7; 10].into());
        self.act(|stream, _, send| {
            stream.publish(
                Time::ZERO,
                Update { form, ..update(index, round) },
                &body,
                10,
                &mut |to, frame| send(to, frame),
            );
        })
    }

    fn publish_whole(&mut self, round: Clock, is_encoded: bool) -> Sent {
        (0..CHUNKS).flat_map(|index| self.publish(index, round, is_encoded)).collect()
    }

    fn subscribe(&mut self, rank: u32, epoch: u32, version: Option<Clock>) -> Sent {
        self.act(|stream, chunks, send| {
            let position = position(epoch, version);
            stream.subscribe(worker(rank), position, chunks, &mut |to, frame| send(to, frame));
        })
    }

    fn note_seen(&mut self, rank: u32, version: Clock) -> Sent {
        self.act(|stream, chunks, send| {
            stream.note_seen(Time::ZERO, worker(rank), version, chunks, &mut |to, frame| send(to, frame));
        })
    }
}

/// The frames of whole versions for a worker.
fn whole(rank: u32, versions: std::ops::RangeInclusive<Clock>, is_encoded: bool) -> Sent {
    let chunks = |version| (0..CHUNKS as u32).map(move |chunk| (worker(rank), version, chunk, is_encoded));
    versions.flat_map(chunks).collect()
}

#[test]
fn a_receiver_gets_what_it_lacks_and_then_what_comes() {
    let mut bench = Bench::new();
    assert_eq!(bench.publish_whole(0, false), [], "nobody follows");
    assert_eq!(bench.subscribe(1, 1, None), whole(1, 0..=0, false));
    for version in 1..=3 {
        assert_eq!(bench.publish_whole(version, true), whole(1, version..=version, true));
    }
    // One that has version 1 gets the two that follow as they were; one that has none, all chunks as they are.
    assert_eq!(bench.subscribe(2, 1, Some(1)), whole(2, 2..=3, true));
    assert_eq!(bench.subscribe(3, 1, None), whole(3, 3..=3, false));
    assert_eq!(bench.subscribe(4, 1, Some(3)), []);
    let to_all = bench.publish(0, 4, true);
    assert_eq!(to_all, [1, 2, 3, 4].map(|rank| (worker(rank), 4, 0, true)));
    // What was published of the open version comes too.
    assert_eq!(bench.subscribe(5, 1, Some(3)), [(worker(5), 4, 0, true)]);
}

#[test]
fn a_version_of_values_is_sent_as_they_are_by_then() {
    let mut bench = Bench::new();
    (0..=5).for_each(|version| drop(bench.publish_whole(version, false)));
    assert_eq!(bench.subscribe(1, 1, Some(2)), whole(1, 5..=5, false), "not three times");
    assert_eq!(bench.stream.log_bytes(), 0);
}

#[test]
fn who_does_not_say_what_it_has_is_sent_no_more_until_it_does() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    bench.subscribe(1, 1, Some(0));
    let most = limits::MAX_VERSIONS_UNSEEN;
    for version in 1..=most {
        assert_eq!(bench.publish_whole(version, true), whole(1, version..=version, true));
    }
    for version in most + 1..=most + 3 {
        assert_eq!(bench.publish_whole(version, true), []);
    }
    assert_eq!(bench.note_seen(1, 1), whole(1, most + 1..=most + 3, true));
    // It cannot have what it was not sent.
    assert_eq!(bench.note_seen(1, u64::MAX), []);
    assert_eq!(bench.publish_whole(most + 4, true), whole(1, most + 4..=most + 4, true));
}

/// A relay that is behind its child sends versions which the child has, and never says to have seen.
#[test]
fn who_has_more_than_its_relay_is_sent_what_comes_after() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    let ahead = 3 * limits::MAX_VERSIONS_UNSEEN;
    assert_eq!(bench.subscribe(1, 1, Some(ahead)), []);
    for version in 1..=ahead + 2 {
        assert_eq!(bench.publish_whole(version, true), whole(1, version..=version, true));
    }
    assert!(!bench.stream.is_settled(), "it has not said to have the last two");
    bench.note_seen(1, ahead + 2);
    assert!(bench.stream.is_settled());
}

#[test]
fn nobody_waits_for_readers() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    let reader = NodeId::Worker(WorkerId::reader(0)).into();
    bench.act(|stream, chunks, send| {
        stream.subscribe(reader, position(1, None), chunks, &mut |to, frame| send(to, frame));
    });
    assert_eq!(bench.publish_whole(1, true).len(), CHUNKS);
    assert!(bench.stream.is_settled() && bench.stream.is_followed_by(reader));
    bench.subscribe(1, 1, Some(0));
    assert!(!bench.stream.is_settled(), "a worker was sent version 1");
}

#[test]
fn who_knows_of_other_codecs_first_is_served_when_they_hold() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    bench.subscribe(1, 1, Some(0));
    assert_eq!(bench.subscribe(2, 2, Some(0)), [], "its epoch has not begun");
    assert_eq!(bench.publish_whole(1, true), whole(1, 1..=1, true));
    bench.chunks.epoch = 2;
    let sent = bench.act(|stream, chunks, send| stream.restart(chunks, &mut |to, frame| send(to, frame)));
    assert_eq!(sent, whole(2, 1..=1, false), "frames of the former codecs are not sent again");
    assert_eq!(bench.publish_whole(2, true), whole(2, 2..=2, true), "worker 1 asks when it knows");
    assert_eq!(bench.subscribe(1, 1, Some(1)), [], "it does not know yet");
    assert_eq!(bench.subscribe(1, 2, Some(1)), whole(1, 2..=2, true));
}

#[test]
fn the_log_has_a_bound_in_versions_and_in_bytes() {
    let mut bench = Bench::new();
    (0..200).for_each(|version| drop(bench.publish_whole(version, true)));
    bench.stream.trim(usize::MAX);
    let last = 199;
    let first = last - limits::MAX_VERSIONS_LOGGED as Clock;
    assert_eq!(bench.subscribe(1, 1, Some(first)), whole(1, first + 1..=last, true));
    assert_eq!(bench.subscribe(2, 1, Some(first - 1)), whole(2, last..=last, false));
    bench.stream.trim(0);
    assert_eq!(
        (bench.stream.log_bytes(), bench.subscribe(3, 1, Some(last - 1))),
        (0, whole(3, last..=last, false))
    );
}

/// Its first frames came when nobody followed, or when other codecs held.
#[test]
fn a_version_that_is_followed_from_its_middle_on_is_whole() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    bench.publish(0, 1, true);
    bench.act(|stream, _, _| stream.skip_to(Some(0)));
    assert_eq!(bench.subscribe(1, 1, Some(0)), [(worker(1), 1, 0, false)], "as it is by now");
    assert_eq!(bench.publish(1, 1, true), [(worker(1), 1, 1, true)]);
    assert_eq!(bench.subscribe(2, 1, Some(0)), [(worker(2), 1, 0, false), (worker(2), 1, 1, true)]);
    bench.publish(2, 1, true);
    // What is not logged from its first frame on is not sent from the log.
    assert_eq!(bench.subscribe(3, 1, Some(0)), whole(3, 1..=1, false));
}

#[test]
fn who_is_gone_is_sent_nothing() {
    let mut bench = Bench::new();
    bench.publish_whole(0, false);
    (1..=2).for_each(|rank| drop(bench.subscribe(rank, 1, Some(0))));
    bench.stream.forget(worker(1));
    assert_eq!(bench.publish_whole(1, true), whole(2, 1..=1, true));
    assert_eq!(bench.note_seen(1, 1), []);
    assert!(bench.stream.is_beyond(&position(1, Some(0))) && !bench.stream.is_beyond(&position(1, Some(1))));
}

/// A replica of one stream, and what brings it from one version to the next.
fn replica(codec: &str) -> (Replica, Arc<crate::codec::Codec>) {
    let policy = Policy::default().with(Axis::AnswerCodec, codec);
    let codec = Arc::new(policy.codecs(&Registry::builtin()).unwrap().answer);
    let chunks = (0..CHUNKS).map(|index| (index * ELEMENTS..(index + 1) * ELEMENTS, 0));
    (Replica::new(CHUNKS * ELEMENTS, Some(codec.clone()), chunks), codec)
}

fn encoded(codec: &Arc<crate::codec::Codec>, values: &[f32]) -> Vec<u8> {
    let mut payload = Vec::new();
    let context = crate::codec::Context { layer_elements: ELEMENTS as u64, ..Default::default() };
    Encoder::without_memory(codec.clone()).encode(0, values, &context, &mut payload).unwrap();
    payload
}

fn plain(value: f32) -> Vec<u8> {
    bytemuck::cast_slice(&[value; ELEMENTS]).to_vec()
}

#[test]
fn a_replica_takes_each_difference_once_and_in_order() {
    let (mut replica, codec) = replica("topk:1");
    let difference = encoded(&codec, &[2.0; ELEMENTS]);
    let of = |index, version| Update { form: Form::Encoded, ..update(index, version) };
    assert_eq!(replica.take(0, &of(0, 1), &difference), Taken::Missing, "it has no values yet");
    (0..CHUNKS).for_each(|index| assert_eq!(replica.take(0, &update(index, 0), &plain(5.0)), Taken::Applied));
    assert_eq!(replica.version(0), Some(0));
    assert_eq!(replica.take(0, &of(0, 2), &difference), Taken::Missing, "version 1 is missing");
    assert_eq!(replica.take(0, &of(0, 1), &difference), Taken::Applied);
    assert_eq!(replica.take(0, &of(0, 1), &difference), Taken::Known);
    assert_eq!(replica.take(0, &of(1, 1), &[1, 2, 3]), Taken::Missing, "it cannot be read");
    // The end of a version of which a chunk is missing does not make it whole.
    assert_eq!(replica.take(0, &of(2, 1), &difference), Taken::Missing);
    assert_eq!((replica.version(0), replica.chunk(0, 0).2), (Some(0), &[7.0; ELEMENTS][..]));
    assert_eq!(replica.take(0, &of(1, 1), &difference), Taken::Applied);
    assert_eq!(replica.take(0, &of(2, 1), &difference), Taken::Known);
    assert_eq!(replica.version(0), Some(1), "whatever brought its chunks");
    // Values that were read when they left are newer than the version that they are a part of.
    let newer = Update { version: 4, ..update(1, 2) };
    assert_eq!(replica.take(0, &newer, &plain(9.0)), Taken::Applied);
    assert_eq!(replica.take(0, &of(1, 2), &difference), Taken::Known);
    assert_eq!(replica.chunk(0, 1), (1, Some(4), &[9.0; ELEMENTS][..]));
    replica.forget(0);
    assert_eq!((replica.version(0), replica.take(0, &update(0, 0), &plain(1.0))), (None, Taken::Applied));
}

#[test]
fn a_replica_that_differs_says_so() {
    let (mut replica, _) = replica("none");
    let all_but_last = |replica: &mut Replica, version| {
        for index in 0..CHUNKS - 1 {
            assert_eq!(replica.take(0, &update(index, version), &plain(5.0)), Taken::Applied);
        }
    };
    all_but_last(&mut replica, 0);
    let mut digest = Digest::new();
    (0..CHUNKS).for_each(|_| digest.take(Digest::of_chunk(&[5.0; ELEMENTS])));
    let last = Update { digest: digest.finish(), ..update(CHUNKS - 1, 0) };
    assert_eq!(replica.take(0, &last, &plain(5.5)), Taken::Differs);
    assert_eq!(replica.version(0), None);
    let again = Update { version: 1, round: 1, ..last };
    all_but_last(&mut replica, 1);
    assert_eq!((replica.take(0, &again, &plain(5.0)), replica.version(0)), (Taken::Applied, Some(1)));
}

#[test]
fn a_replica_takes_no_chunk_that_is_not_the_streams() {
    let (mut replica, _) = replica("none");
    let other = |chunk, sequence| {
        let piece = Piece { chunk, sequence, is_last: false };
        Update { piece, ..update(0, 0) }
    };
    for (chunk, sequence) in [(3, 3), (u32::MAX, 0), (1, 0), (0, u32::MAX)] {
        assert_eq!(replica.take(0, &other(chunk, sequence), &plain(1.0)), Taken::Missing);
    }
    assert_eq!(replica.take(0, &update(0, 0), &plain(1.0)[..12]), Taken::Missing);
    let halves = Update { form: Form::Dense(crate::wire::DType::F16), ..update(0, 0) };
    assert_eq!(replica.take(0, &halves, &plain(1.0)), Taken::Missing);
}
