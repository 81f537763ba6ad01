//! What happens in a world.

use super::channel::Flight;
use paramill_core::checkpoint::Request;
use paramill_core::role::Lost;
use paramill_core::types::{ConnectionId, Time};
use paramill_core::wire::{Hello, Welcome};
use std::time::Duration;

#[derive(Debug)]
pub(super) enum Event {
    /// A connection is asked for at its target.
    Dial { from: usize, life: u32, name: ConnectionId, target: usize, hello: Hello },
    /// The answer to a dial is back.
    Dialled { connection: usize, welcome: Welcome },
    /// A connection could not be made.
    Unreachable { node: usize, life: u32, name: ConnectionId, why: Lost },
    /// The first byte of a frame is at its receiver's link.
    Arrive { flight: Flight, tail: Time },
    /// A node looks at what there is to read.
    Read { node: usize },
    /// What was sent on a connection was read: there is room for more.
    Room { connection: usize, side: usize },
    /// A broken connection is noticed at one of its ends.
    Lost { connection: usize, side: usize, why: String },
    /// A role's timeout.
    Timer { node: usize },
    /// The archive carries out what a role asked of it.
    Archived { node: usize, life: u32, request: Box<Request> },
    /// A fault.
    Pause { node: usize, length: Duration },
    /// The end of a pause.
    Resume { node: usize },
    /// A fault.
    Crash { node: usize },
    /// A fault of all nodes of a process.
    CrashProcess { process: u32, death: usize },
    /// What a node asked for is on its disk.
    Stored { node: usize, life: u32, state: Vec<u8> },
    /// The node is started anew.
    Restart { node: usize, rebirth: usize },
    /// Another process takes the place of the node.
    Replace { node: usize, rebirth: usize },
}
