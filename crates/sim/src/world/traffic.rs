//! How frames travel: over the sender's link, over the receiver's, to the receiver's attention.

use super::connections::End;
use super::{Event, Flight, Observer, SPARE_BUFFERS, World};
use crate::rule::FrameView;
use paramill_core::fault::Delay;
use paramill_core::role::Role;
use paramill_core::types::{NodeId, Time};
use paramill_core::wire::Header;

impl<R: Role> World<R> {
    pub(super) fn send<O: Observer<R>>(
        &mut self,
        index: usize,
        to: NodeId,
        header: Header,
        payload: Vec<u8>,
        observer: &mut O,
    ) -> Result<(), String> {
        let node = &self.nodes[index];
        let Some(&connection) = node.peers.get(&to).filter(|&&at| self.connections[at].open) else {
            self.recycle(payload);
            return Ok(());
        };
        let view = FrameView { now: self.now, from: node.id, to, header: &header, payload: &payload };
        observer.on_sent(&view, &node.role)?;
        self.frames += 1;
        // Rules are about nodes: one that is taken for another, as an aggregator is for shards, is named itself.
        let other = self.connections[connection].other_end(index).node;
        let view = FrameView { to: self.nodes[other].id, ..view };
        match self.rules.on_frame(&view) {
            None => {
                self.recycle(payload);
                self.reset(connection, "the connection was reset");
            }
            Some(delay) => self.launch(index, connection, Some(header), payload, delay),
        }
        Ok(())
    }

    /// Puts a frame, or the end of the connection, on its way.
    pub(super) fn launch(
        &mut self,
        index: usize,
        connection: usize,
        header: Option<Header>,
        payload: Vec<u8>,
        delay: Delay,
    ) {
        let side = self.connections[connection].other_side(index);
        let to = self.connections[connection].ends[side].node;
        let (from_host, to_host) = (self.nodes[index].host, self.nodes[to].host);
        let connected = &mut self.connections[connection];
        let passage =
            self.network.send(self.now, from_host, to_host, payload.len(), &mut connected.dice[side]);
        let in_turn = (passage.head + delay.connection).max(connected.arrived[side]);
        connected.arrived[side] = in_turn;
        let head = match &header {
            Some(header) => connected.hold_back(side, header, in_turn + delay.answer, in_turn),
            None => in_turn,
        };
        let tail = passage.tail + delay.connection + head.since(in_turn);
        let flight = Flight { connection, side, header, payload };
        // Where nothing has to be waited for on arrival, the frame is delivered by one event instead of two.
        if self.nodes[to].handling.is_zero() && !self.network.queues(from_host, to_host) {
            self.queue.push(head, Event::Deliver(flight));
        } else {
            self.queue.push(head, Event::Arrive { flight, tail });
        }
    }

    /// A frame reaches the receiver's link and waits for the link, then for the node's attention.
    pub(super) fn receive(&mut self, index: usize, flight: Flight, tail: Time) {
        let connection = &mut self.connections[flight.connection];
        let from = self.nodes[connection.ends[1 - flight.side].node].host;
        let node = &mut self.nodes[index];
        let through = self.network.receive(self.now, from, node.host, tail, flight.payload.len());
        let start = through.max(node.busy_until);
        node.busy_until = start + node.handling;
        let at = node.busy_until.max(connection.delivered[flight.side]);
        connection.delivered[flight.side] = at;
        self.queue.push(at, Event::Deliver(flight));
    }

    pub(super) fn deliver<O: Observer<R>>(
        &mut self,
        index: usize,
        flight: Flight,
        observer: &mut O,
    ) -> Result<bool, String> {
        let connection = &self.connections[flight.connection];
        let End { peer, .. } = connection.ends[flight.side];
        let node = &mut self.nodes[index];
        let attached = node.peers.get(&peer) == Some(&flight.connection);
        let called = match flight.header {
            Some(header) if connection.open && attached => {
                let view = FrameView {
                    now: self.now,
                    from: peer,
                    to: node.id,
                    header: &header,
                    payload: &flight.payload,
                };
                observer.on_delivered(&view, &node.role)?;
                node.role.handle_frame(self.now, peer, &header, &flight.payload);
                true
            }
            Some(_) => false,
            None => self.lose(flight.connection, flight.side, "the peer closed the connection"),
        };
        self.recycle(flight.payload);
        Ok(called)
    }

    pub(super) fn recycle(&mut self, mut buffer: Vec<u8>) {
        if self.spare.len() < SPARE_BUFFERS && buffer.capacity() > 0 {
            buffer.clear();
            self.spare.push(buffer);
        }
    }
}
