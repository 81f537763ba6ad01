//! Every frame of a world as a line of text, to see how a promise came to be broken.

use super::Checker;
use crate::actor::Actor;
use crate::rule::FrameView;
use paramill_core::types::NodeId;
use paramill_core::wire::control::decode;
use paramill_core::wire::{Control, Flags, Header, Kind};

/// Hands over a line for each frame that a link takes and for each that is handled. It finds nothing.
#[derive(Debug)]
pub struct Trace {
    line: fn(&str),
}

impl Trace {
    /// Hands lines to `line`.
    pub fn new(line: fn(&str)) -> Trace {
        Trace { line }
    }

    fn say(&self, frame: &FrameView<'_>, arrow: &str) {
        let FrameView { now, from, to, shard, header, payload } = *frame;
        // Between a worker and an aggregator the nodes do not tell whose frames these are.
        let relayed = shard.filter(|shard| [from, to].iter().all(|node| *node != NodeId::Shard(*shard)));
        let about = relayed.map(|shard| format!(" for {shard}")).unwrap_or_default();
        (self.line)(&format!(
            "{:10.6} {from} {arrow} {to}{about}: {}",
            now.as_secs_f64(),
            describe(header, payload)
        ));
    }
}

impl Checker for Trace {
    fn on_sent(&mut self, frame: &FrameView<'_>, _: &Actor) -> Result<(), String> {
        self.say(frame, "->");
        Ok(())
    }

    fn on_delivered(&mut self, frame: &FrameView<'_>, _: &Actor) -> Result<(), String> {
        self.say(frame, ">>");
        Ok(())
    }
}

/// A control message in whole, and of every other frame what tells it apart.
fn describe(header: &Header, payload: &[u8]) -> String {
    if header.kind == Kind::Control
        && let Ok(control) = decode::<Control>("control", payload)
    {
        return format!("{control:?}");
    }
    let flags = FLAGS.iter().filter(|(flag, _)| header.flags.has(*flag)).map(|(_, name)| *name);
    let flags = flags.collect::<Vec<_>>().join(" ");
    let Header { kind, epoch, table, chunk, part, rows, clock, version, request, landing, .. } = header;
    let Header { payload_bytes, .. } = header;
    format!(
        "{kind:?} table {} chunk {chunk} part {part} clock {clock} version {version} request {request} epoch {epoch} rows {rows} \
         landing {landing:x}, {payload_bytes} bytes {flags}",
        table.0
    )
}

const FLAGS: [(Flags, &str); 7] = [
    (Flags::LAST, "last"),
    (Flags::ROWS, "rows"),
    (Flags::WANT_PARAMS, "want-params"),
    (Flags::NOW, "now"),
    (Flags::ELSEWHERE, "elsewhere"),
    (Flags::ENCODED, "encoded"),
    (Flags::ABSENT, "absent"),
];
