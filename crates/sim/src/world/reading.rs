//! How nodes read what has arrived.

use super::channel::Flight;
use super::connection::End;
use super::event::Event;
use super::reader::Source;
use super::{Observer, World};
use paramill_core::role::Role;
use paramill_core::types::Time;

/// Makes sure that a node looks at what there is to read as soon as it can.
pub(super) fn call_reader<R: Role + 'static>(own: &mut World<R>, index: usize) {
    let node = &own.nodes[index];
    let listed = node.reader.has_listed().then_some(own.now);
    let Some(at) = listed.into_iter().chain(node.reader.next_received()).min() else { return };
    call_reader_at(own, index, at);
}

pub(super) fn call_reader_at<R: Role + 'static>(own: &mut World<R>, index: usize, at: Time) {
    let node = &mut own.nodes[index];
    let at = at.max(node.busy_until).max(own.now) + node.handling;
    if node.reader.called.is_none_or(|known| known > at) {
        node.reader.called = Some(at);
        own.queue.push(at, Event::Read { node: index });
    }
}

/// Reads the next frame, or all that are there when reading takes no time.
pub(super) fn read<R: Role + 'static, O: Observer<R>>(
    own: &mut World<R>,
    index: usize,
    observer: &mut O,
) -> Result<(), String> {
    while own.nodes[index].ended.is_none()
        && let Some(source) = next_source(own, index)
    {
        own.nodes[index].busy_until = own.now;
        if read_from(own, index, source, observer)? {
            own.settle(index, observer)?;
        }
        if !own.nodes[index].handling.is_zero() {
            call_reader(own, index);
            return Ok(());
        }
    }
    // What is listed and may not be read waits for its peer, which calls the reader; time must pass for the rest.
    if own.nodes[index].ended.is_none()
        && let Some(at) = own.nodes[index].reader.next_received()
    {
        call_reader_at(own, index, at);
    }
    Ok(())
}

/// The connection to read from.
pub(super) fn next_source<R: Role + 'static>(own: &mut World<R>, index: usize) -> Option<Source> {
    let mut reader = std::mem::take(&mut own.nodes[index].reader);
    while let Some(source) = reader.pop_received(own.now) {
        let channel = &mut own.connections[source.connection].channels[source.side];
        channel.note_ready();
        if channel.is_readable() && !std::mem::replace(&mut channel.is_listed, true) {
            reader.list(source);
        }
    }
    let may_be_read = |source: Source| {
        let connection = &own.connections[source.connection];
        let asks = !connection.ends[source.side].name.is_copy();
        let is_congested = source.side == 1 && asks && is_congested(own, source.connection);
        let is_held = allowance(own, index, source) == 0;
        !connection.is_open || (connection.is_attached[source.side] && !is_congested && !is_held)
    };
    let progress = |source: Source| {
        let End { name, .. } = own.connections[source.connection].ends[source.side];
        own.nodes[index].role.progress(name)
    };
    let source = reader.next(may_be_read, progress);
    own.nodes[index].reader = reader;
    source
}

/// How many more frames a node may read from a peer.
pub(super) fn allowance<R: Role + 'static>(own: &World<R>, index: usize, source: Source) -> usize {
    let from = own.connections[source.connection].ends[1 - source.side].node;
    own.holds.get(&(from, index)).copied().unwrap_or(usize::MAX)
}

/// A frame was read.
pub(super) fn use_allowance<R: Role + 'static>(own: &mut World<R>, index: usize, source: Source) {
    let from = own.connections[source.connection].ends[1 - source.side].node;
    if let Some(allowed) = own.holds.get_mut(&(from, index)) {
        *allowed = allowed.saturating_sub(1);
    }
}

/// Whether the opener of a connection does not take its answers.
pub(super) fn is_congested<R: Role + 'static>(own: &World<R>, connection: usize) -> bool {
    let frames = own.network.config().waiting_frames as usize;
    own.connections[connection].channels[0].is_congested(frames)
}

/// Reads a frame. Says whether the role was called.
pub(super) fn read_from<R: Role + 'static, O: Observer<R>>(
    own: &mut World<R>,
    index: usize,
    source: Source,
    observer: &mut O,
) -> Result<bool, String> {
    let Source { connection, side } = source;
    let channel = &mut own.connections[connection].channels[side];
    let flight = channel.read();
    channel.is_listed = channel.is_readable();
    if channel.is_listed {
        own.nodes[index].reader.list(source);
    }
    use_allowance(own, index, source);
    announce_room(own, connection, side);
    let Some(Flight { header, payload, .. }) = flight else { return Ok(false) };
    let End { name, .. } = own.connections[connection].ends[side];
    let is_known = own.nodes[index].connections.get(&name) == Some(&connection);
    let is_told = match header {
        Some(header) if own.connections[connection].is_open && is_known => {
            own.hand_over(index, source, &header, payload.bytes(), observer)?;
            true
        }
        Some(_) => false,
        None => own.lose(connection, side, "the peer closed the connection"),
    };
    own.copies.recycle(payload);
    Ok(is_told)
}

pub(super) fn announce_room<R: Role + 'static>(own: &mut World<R>, connection: usize, side: usize) {
    if own.connections[connection].channels[side].announces_room() {
        let [one, other] = own.connections[connection].ends;
        let latency = own.latency(one.node, other.node);
        own.queue.push(own.now + latency, Event::Room { connection, side });
    }
}
