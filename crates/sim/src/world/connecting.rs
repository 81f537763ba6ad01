//! How connections come about.

use super::connection::{Connection, End};
use super::event::Event;
use super::node::Node;
use super::{World, label};
use paramill_core::prng::Prng;
use paramill_core::role::{Lost, Role};
use paramill_core::types::ConnectionId;
use paramill_core::wire::Hello;

/// A node asks for a connection.
pub(super) fn dial<R: Role + 'static>(own: &mut World<R>, index: usize, name: ConnectionId, address: &str) {
    let Node { id, life, .. } = own.nodes[index];
    let target = own.directory.find(address);
    let reached = match target {
        Some(target) => match own.rules.on_connect(own.now, id, own.nodes[target].id) {
            Some(why) => Err(why),
            None => Ok(target),
        },
        None => Err(format!("no node has the address `{address}`")),
    };
    let event = match reached {
        Ok(target) => {
            let hello = own.nodes[index].role.hello(name);
            Event::Dial { from: index, life, name, target, hello }
        }
        Err(why) => Event::Unreachable { node: index, life, name, why: Lost::Broken(why) },
    };
    let latency = own.latency(index, target.unwrap_or(index));
    own.queue.push(own.now + latency, event);
}

/// Somebody's hello is heard and answered.
pub(super) fn accept<R: Role + 'static>(
    own: &mut World<R>,
    index: usize,
    (from, life): (usize, u32),
    name: ConnectionId,
    hello: &Hello,
) {
    let back = own.latency(index, from);
    // The same peer may dial again before its old connection's end was noticed here: that ends first.
    if let Some(old) = own.nodes[index].openers.remove(&(from, name)) {
        let End { name, .. } = own.connections[old].ends[1];
        if own.nodes[index].connections.get(&name) == Some(&old) {
            own.reset(old, "replaced by a new connection");
            own.lose(old, 1, "replaced by a new connection");
        }
    }
    match own.nodes[index].role.accept(own.now, hello) {
        Ok(welcome) => {
            let connection = own.connections.len();
            let own_name = hello.connection(welcome.you);
            let ends = [End { node: from, name }, End { node: index, name: own_name }];
            // Each pair has dice of its own: who else talks to whom changes nothing for them.
            let labels = [label(own.nodes[from].id), label(own.nodes[index].id)];
            let dice =
                labels.map(|label| Prng::fork(own.seed ^ labels[0] ^ labels[1].rotate_left(32), label));
            own.connections.push(Connection::new(ends, life, own.now + back, dice));
            own.nodes[index].openers.insert((from, name), connection);
            own.attach(connection, 1);
            own.queue.push(own.now + back, Event::Dialled { connection, welcome });
        }
        Err(refusal) => {
            let event = Event::Unreachable { node: from, life, name, why: Lost::Refused(refusal) };
            own.queue.push(own.now + back, event);
        }
    }
}
