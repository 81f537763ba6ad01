//! The first words on a connection, on both sides.

use super::Named;
use paramill_core::role::{Lost, Role};
use paramill_core::types::{ConnectionId, Time};
use paramill_core::wire::control::decode;
use paramill_core::wire::{Header, Hello, Kind, Refusal, Welcome};
use std::collections::BTreeMap;

/// What a hello is answered with, and the connection of the same name that ended with it.
pub(super) struct Greeting {
    /// The welcome comes with the role's name for the connection.
    pub(super) answer: Result<(ConnectionId, Welcome), Refusal>,
    pub(super) replaced: Option<u64>,
}

/// A peer's first frame must be a hello that the role accepts.
pub(super) fn greet(
    role: &mut impl Role,
    now: Time,
    header: &Header,
    payload: &[u8],
    names: &BTreeMap<ConnectionId, Named>,
) -> Greeting {
    let refuse = |reason: String| Greeting { answer: Err(Refusal { reason, retry: false }), replaced: None };
    if header.kind != Kind::Hello {
        return refuse(format!("expected a hello first, got a {:?} frame", header.kind));
    }
    let hello = match decode::<Hello>("hello", payload) {
        Ok(hello) => hello,
        Err(error) => return refuse(error.to_string()),
    };
    // A node that comes back before its old connection was seen to break: the old one ends first.
    let known = hello.caller().map(|caller| hello.connection(caller));
    let replaced = known
        .and_then(|name| Some((name, *names.get(&name)?)))
        .filter(|(_, found)| found.incarnation == hello.incarnation);
    if let Some((name, _)) = replaced {
        role.handle_disconnected(now, name, &Lost::Broken("replaced by a new connection".into()));
    }
    let answer = role.accept(now, &hello).map(|welcome| (hello.connection(welcome.you), welcome));
    Greeting { answer, replaced: replaced.map(|(_, found)| found.key) }
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
