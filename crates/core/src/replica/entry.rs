//! Inputs of a shard as entries of a log.

use crate::checkpoint::{Response, SavedFile};
use crate::limits::ENTRY_PREFIX_BYTES;
use crate::role::{Lost, Role};
use crate::server::Shard;
use crate::types::{ConnectionId, Time};
use crate::wire::{HEADER_BYTES, Header, Hello, Plan, Welcome};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Something that happens to a shard. The same events at the same times make the same shard.
#[derive(Debug)]
pub(super) enum Event<'a> {
    /// A frame arrived.
    Frame(ConnectionId, Header, &'a [u8]),
    /// A peer that said hello was accepted, and told so.
    Accepted(Hello, Welcome),
    /// A connection that the shard asked for stands.
    Connected(ConnectionId, Welcome),
    /// A connection ended, or could not be made.
    Disconnected(ConnectionId, Lost),
    /// Time has passed.
    Timeout,
    /// What was copied for the checkpoint in this folder is written, or is not.
    Written(String, Result<SavedFile, String>),
    /// An image is about to be made for another copy: what it does not keep is dropped.
    Imaged,
    /// What follows happens to the shard as it was after so many entries of the log of the process that served it before.
    Follows(u64),
    /// Another process took the shard over by this plan.
    TakenOver(Box<Plan>),
}

/// Numbers of the kinds of events.
const FRAME: u8 = 0;
const ACCEPTED: u8 = 1;
const CONNECTED: u8 = 2;
const DISCONNECTED: u8 = 3;
const TIMEOUT: u8 = 4;
const WRITTEN: u8 = 5;
const IMAGED: u8 = 6;
const FOLLOWS: u8 = 7;
const TAKEN_OVER: u8 = 8;

/// Where the parts of the prefix are. Payloads stay aligned behind it.
const KIND_AT: usize = 8;
const LENGTH_AT: usize = 9;
const CONNECTION_AT: usize = 10;
const HEADER_AT: usize = ENTRY_PREFIX_BYTES - HEADER_BYTES;

impl Event<'_> {
    /// The entry of this event at a time.
    pub(super) fn encode(&self, now: Time) -> Vec<u8> {
        let rest = match self {
            Event::Frame(_, _, payload) => payload.len(),
            _ => 0,
        };
        let mut bytes = Vec::with_capacity(ENTRY_PREFIX_BYTES + rest);
        bytes.resize(ENTRY_PREFIX_BYTES, 0);
        bytes[..KIND_AT].copy_from_slice(&now.0.to_le_bytes());
        match self {
            Event::Frame(connection, header, payload) => {
                bytes[KIND_AT] = FRAME;
                put_connection(&mut bytes, *connection);
                bytes[HEADER_AT..ENTRY_PREFIX_BYTES].copy_from_slice(&header.encode());
                bytes.extend_from_slice(payload);
            }
            Event::Accepted(hello, welcome) => {
                bytes[KIND_AT] = ACCEPTED;
                put(&mut bytes, &(hello, welcome));
            }
            Event::Connected(connection, welcome) => {
                bytes[KIND_AT] = CONNECTED;
                put_connection(&mut bytes, *connection);
                put(&mut bytes, welcome);
            }
            Event::Disconnected(connection, why) => {
                bytes[KIND_AT] = DISCONNECTED;
                put_connection(&mut bytes, *connection);
                put(&mut bytes, why);
            }
            Event::Timeout => bytes[KIND_AT] = TIMEOUT,
            Event::Imaged => bytes[KIND_AT] = IMAGED,
            Event::Follows(entries) => {
                bytes[KIND_AT] = FOLLOWS;
                put(&mut bytes, entries);
            }
            Event::TakenOver(plan) => {
                bytes[KIND_AT] = TAKEN_OVER;
                put(&mut bytes, plan);
            }
            Event::Written(folder, file) => {
                bytes[KIND_AT] = WRITTEN;
                put(&mut bytes, &(folder, file));
            }
        }
        bytes
    }

    /// Reads an entry. It comes from the process that serves the shard, which may be of another release or broken.
    pub(super) fn decode(entry: &[u8]) -> Result<(Time, Event<'_>), String> {
        let Some((prefix, rest)) = entry.split_first_chunk::<ENTRY_PREFIX_BYTES>() else {
            return Err(format!("an entry of {} bytes is too short", entry.len()));
        };
        let (time, _) = prefix.split_first_chunk::<KIND_AT>().expect("the prefix is longer");
        let now = Time(u64::from_le_bytes(*time));
        let connection = || {
            let end = CONNECTION_AT + usize::from(prefix[LENGTH_AT]);
            let bytes = prefix.get(CONNECTION_AT..end).ok_or("an entry's connection is too long")?;
            postcard::from_bytes(bytes).map_err(|_| "an entry's connection cannot be read")
        };
        let event = match prefix[KIND_AT] {
            FRAME => {
                let header = prefix.last_chunk::<HEADER_BYTES>().expect("the prefix is longer");
                let header = Header::decode(header).map_err(|error| error.to_string())?;
                if header.payload_bytes as usize != rest.len() {
                    return Err(format!("an entry has {} bytes of {}", rest.len(), header.payload_bytes));
                }
                Event::Frame(connection()?, header, rest)
            }
            ACCEPTED => {
                let (hello, welcome) = read(rest)?;
                Event::Accepted(hello, welcome)
            }
            CONNECTED => Event::Connected(connection()?, read(rest)?),
            DISCONNECTED => Event::Disconnected(connection()?, read(rest)?),
            TIMEOUT => Event::Timeout,
            IMAGED => Event::Imaged,
            FOLLOWS => Event::Follows(read(rest)?),
            TAKEN_OVER => Event::TakenOver(read(rest)?),
            WRITTEN => {
                let (folder, file) = read(rest)?;
                Event::Written(folder, file)
            }
            other => return Err(format!("an entry of the unknown kind {other}")),
        };
        Ok((now, event))
    }

    /// Lets it happen.
    pub(super) fn apply(self, now: Time, shard: &mut Shard) {
        match self {
            Event::Frame(connection, header, payload) => {
                shard.handle_frame(now, connection, &header, payload);
            }
            Event::Accepted(hello, welcome) => shard.admit(now, &hello, &welcome),
            Event::Connected(connection, welcome) => shard.handle_connected(now, connection, &welcome),
            Event::Disconnected(connection, why) => shard.handle_disconnected(now, connection, &why),
            Event::Timeout => shard.handle_timeout(now),
            Event::Imaged => shard.reduce_to_image(),
            // Its log is not the shard's business.
            Event::Follows(_) => {}
            Event::TakenOver(plan) => shard.take_over(now, *plan),
            Event::Written(folder, file) => shard.handle_archived(now, Response::Written { folder, file }),
        }
    }
}

fn put_connection(bytes: &mut [u8], connection: ConnectionId) {
    let encoded = postcard::to_allocvec(&connection).expect("a name can be encoded");
    bytes[LENGTH_AT] = encoded.len() as u8;
    bytes[CONNECTION_AT..CONNECTION_AT + encoded.len()].copy_from_slice(&encoded);
}

fn put(bytes: &mut Vec<u8>, value: &impl Serialize) {
    bytes.extend(postcard::to_allocvec(value).expect("a message can be encoded"));
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    postcard::from_bytes(bytes).map_err(|_| "an entry cannot be read".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Digest;
    use crate::policy::Policy;
    use crate::types::{NodeId, ServerId, ShardId, WorkerId};
    use crate::wire::{Kind, Party, Refusal};
    use proptest::prelude::*;

    fn plan() -> Plan {
        Plan {
            epoch: 7,
            tables: vec![],
            parts: vec![],
            whole: vec![],
            shards: vec![],
            workers: 2,
            members: vec![],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 3,
            resumed: None,
        }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let worker = ConnectionId::Node(NodeId::Worker(WorkerId(u32::MAX)));
        let shard = ShardId { server: ServerId(u32::MAX), core: u32::MAX };
        let header = Header { payload_bytes: 3, request: 7, ..Header::new(Kind::Push) };
        let hello = Hello {
            job: "job".into(),
            from: Party::Worker { rank: Some(WorkerId(2)) },
            incarnation: 9,
            to: None,
        };
        let refused = Lost::Refused(Refusal { reason: "no".into(), retry: false });
        let welcome = || Welcome { you: NodeId::Shard(shard), incarnation: 4, session: 5 };
        let events = [
            Event::Frame(worker, header, &[1, 2, 3]),
            Event::Accepted(hello, welcome()),
            Event::Connected(NodeId::Coordinator.into(), welcome()),
            Event::Disconnected(ConnectionId::LowerFor(crate::types::AggregatorId(u32::MAX), shard), refused),
            Event::Timeout,
            Event::Imaged,
            Event::Follows(u64::MAX),
            Event::TakenOver(Box::new(plan())),
            Event::Written("step-1".into(), Ok(SavedFile { name: "w".into(), bytes: 3, digest: Digest(4) })),
            Event::Written("step-1".into(), Err("the disk is full".into())),
        ];
        for (number, event) in events.iter().enumerate() {
            let entry = event.encode(Time(number as u64));
            let (now, read) = Event::decode(&entry).unwrap();
            assert_eq!((now.0, format!("{read:?}")), (number as u64, format!("{event:?}")));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Event::decode(&bytes);
        }

        #[test]
        fn an_entry_that_is_damaged_is_read_or_refused(at in 0usize..140, to in any::<u8>()) {
            let header = Header { payload_bytes: 12, ..Header::new(Kind::Push) };
            let mut entry = Event::Frame(NodeId::Coordinator.into(), header, &[0; 12]).encode(Time(1));
            entry[at] = to;
            let _ = Event::decode(&entry);
        }
    }
}
