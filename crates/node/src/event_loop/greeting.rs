//! The first words on a connection, on both sides.

use super::Peer;
use paramill_core::role::{Lost, Role};
use paramill_core::types::{NodeId, ShardId, Time};
use paramill_core::wire::control::decode;
use paramill_core::wire::{Header, Hello, Kind, Party, Refusal, Welcome};
use std::collections::BTreeMap;

/// What a hello is answered with, and the connection of the same peer that ended with it.
pub(super) struct Greeting {
    pub(super) answer: Result<Welcome, Refusal>,
    pub(super) replaced: Option<u64>,
}

/// A peer's first frame must be a hello that the role accepts.
pub(super) fn greet(
    role: &mut impl Role,
    now: Time,
    header: &Header,
    payload: &[u8],
    peers: &BTreeMap<NodeId, Peer>,
) -> Greeting {
    let refuse = |reason: String| Greeting { answer: Err(Refusal { reason, retry: false }), replaced: None };
    if header.kind != Kind::Hello {
        return refuse(format!("expected a hello first, got a {:?} frame", header.kind));
    }
    match decode::<Hello>("hello", payload) {
        Ok(hello) => greet_hello(role, now, &hello, peers),
        Err(error) => refuse(error.to_string()),
    }
}

pub(super) fn greet_hello(
    role: &mut impl Role,
    now: Time,
    hello: &Hello,
    peers: &BTreeMap<NodeId, Peer>,
) -> Greeting {
    // A node that comes back before its old connection was seen to break: the old one ends first.
    let known = match hello.from {
        Party::Worker { rank: Some(rank) } => Some(NodeId::Worker(rank)),
        Party::Shard { server: Some(server), core, .. } => Some(NodeId::Shard(ShardId { server, core })),
        Party::Aggregator { id: Some(id), .. } => Some(NodeId::Aggregator(id)),
        Party::Through { rank, shard, .. } => Some(NodeId::Through(rank, shard)),
        _ => None,
    };
    let replaced = known
        .and_then(|peer| Some((peer, *peers.get(&peer)?)))
        .filter(|(_, found)| found.incarnation == hello.incarnation);
    if let Some((peer, _)) = replaced {
        role.handle_disconnected(now, peer, &Lost::Broken("replaced by a new connection".into()));
    }
    Greeting { answer: role.accept(now, hello), replaced: replaced.map(|(_, found)| found.key) }
}

/// The answer to our hello.
pub(super) fn welcomed(header: &Header, payload: &[u8]) -> Result<Welcome, Lost> {
    match header.kind {
        Kind::Welcome => decode("welcome", payload).map_err(|error| Lost::Broken(error.to_string())),
        Kind::Error => match decode::<Refusal>("refusal", payload) {
            Ok(refusal) => Err(Lost::Refused(refusal)),
            Err(error) => Err(Lost::Broken(error.to_string())),
        },
        other => Err(Lost::Broken(format!("expected a welcome, got a {other:?} frame"))),
    }
}
