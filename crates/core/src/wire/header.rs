use super::{HEADER_BYTES, WIRE_VERSION};
use crate::kernels::Values;
use crate::limits;
use crate::types::{Clock, TableId};

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First frame on a connection: the caller and its job. Payload: [`super::Hello`].
    Hello = 1,
    /// Answer to a hello: the caller's name. Payload: [`super::Welcome`].
    Welcome = 2,
    /// The request could not be carried out. Payload: [`super::Fault`], or [`super::Refusal`] in answer to a hello.
    Error = 3,
    /// A control message. Payload: [`super::Control`].
    Control = 4,
    /// Initial values of a chunk, from worker 0.
    Init = 5,
    /// A gradient for a chunk.
    Push = 6,
    /// A push of this table and clock is complete and counted, or its initial values are complete.
    PushAck = 7,
    /// A request for a table's parameters on this shard.
    Pull = 8,
    /// Parameters of a chunk.
    Params = 9,
    /// A segment of memory that the sender shares; its file descriptor comes with this frame. For drivers: no role
    /// sees it. `landing` has the segment's number and, instead of an offset, its length.
    Share = 10,
    /// From an aggregator: these workers' pushes of a table and clock are complete in the sums before. Payload:
    /// [`super::group`]. Back to it, without payload: noted, as all numbered frames up to this one.
    Group = 11,
    /// From an aggregator: a worker's connection to it broke; pulls of that worker are forgotten.
    Forget = 12,
    /// A chunk of a version that is broadcast.
    Update = 13,
    /// From an aggregator: whose gradients are in the sums that follow. Payload: ranks ([`super::group`]).
    Contributors = 14,
    /// A piece of a shard's image, for a copy.
    Image = 15,
    /// To a copy: an input of the shard ([`crate::replica`]), numbered by `request`. Back, without payload: all up to this one are
    /// there.
    Entry = 16,
}

/// Element type of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum DType {
    /// 32-bit IEEE 754.
    #[default]
    F32 = 0,
    /// 16-bit IEEE 754; on the wire only.
    F16 = 1,
    /// bfloat16; on the wire only.
    Bf16 = 2,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// Views a payload as elements of this type; `None` when its length or address does not allow it.
    pub fn values(self, payload: &[u8]) -> Option<Values<'_>> {
        Some(match self {
            // An empty slice has no alignment to violate.
            _ if payload.is_empty() => Values::F32(&[]),
            DType::F32 => Values::F32(bytemuck::try_cast_slice(payload).ok()?),
            DType::F16 => Values::F16(bytemuck::try_cast_slice(payload).ok()?),
            DType::Bf16 => Values::Bf16(bytemuck::try_cast_slice(payload).ok()?),
        })
    }
}

/// Bits that qualify a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// The last frame of a push, an initialisation or an answer on this shard.
    pub const LAST: Flags = Flags(1);
    /// Single rows. A push carries row numbers, then row values; a pull row numbers alone; an answer values alone.
    pub const ROWS: Flags = Flags(2);
    /// In a push: answer with the parameters when the condition allows, as if a pull followed.
    pub const WANT_PARAMS: Flags = Flags(4);
    /// In a pull: answer at once with what is there, whatever the consistency model (for evaluation).
    pub const NOW: Flags = Flags(8);
    /// The payload lies in shared memory: a [`super::Descriptor`] follows instead. For drivers: no role sees it.
    pub const ELSEWHERE: Flags = Flags(16);
    /// In a push or in parameters: the payload is what the table's codec made ([`crate::codec`]), and names that codec.
    pub const ENCODED: Flags = Flags(64);
    /// In a dense push: the payload begins with the ranges of the chunk that have no gradient ([`crate::absence`]).
    pub const ABSENT: Flags = Flags(128);

    /// Whether all bits of `other` are set.
    pub fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These bits and those of `other`.
    pub fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// Those of these bits that `other` has too.
    pub fn only(self, other: Flags) -> Flags {
        Flags(self.0 & other.0)
    }

    /// These bits without those of `other`.
    pub fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }
}

/// A frame's header, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of the frame.
    pub kind: Kind,
    /// Element type of the payload.
    pub dtype: DType,
    /// Qualifying bits.
    pub flags: Flags,
    /// Payload length in bytes, without padding.
    pub payload_bytes: u32,
    /// The table's [`valid_from`](super::Plan::valid_from) epoch, as the sender knows the plan; 0 in frames without a table.
    pub epoch: u32,
    /// The table concerned.
    pub table: TableId,
    /// The chunk concerned, numbered within its table.
    pub chunk: u32,
    /// This frame's place in its push, initialisation or answer on this shard, from 0.
    pub part: u32,
    /// Number of rows in the payload, with [`Flags::ROWS`]. In a dense push of an aggregator, how many gradients the
    /// payload is the sum of; in its list of workers, the rank + 1 of the one that was complete last.
    pub rows: u32,
    /// Iteration of a push; iterations completed, for a pull. In parameters, how long the answer was delayed, and for whom
    /// ([`crate::waits::Delay`]).
    pub clock: Clock,
    /// Version of the parameters that are sent. In a worker's push, the samples that the gradient is the mean of.
    pub version: Clock,
    /// The sender's number for a request; answers repeat it.
    pub request: u64,
    /// Where in the asking worker's shared memory an answer is to lie ([`crate::store::Place`]); 0 for nowhere. An
    /// answer that names a place may be written there by a driver that shares memory with the worker. In a version that is
    /// broadcast, how long others had waited for the round to close, and for whom.
    pub landing: u64,
}

/// Why bytes from a peer are not a frame. The connection is of no more use; no state was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first four bytes are not ours.
    #[error("the peer does not speak Paramill's protocol")]
    Magic,
    /// The peer speaks another version.
    #[error(
        "the peer speaks wire version {theirs}, this release speaks {ours}; install the same release on both"
    )]
    Version {
        /// The peer's version.
        theirs: u8,
        /// Our version.
        ours: u8,
    },
    /// A field has a value that is not defined.
    #[error("undefined {field} {value} in a frame header")]
    Field {
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The payload is longer than frames of this kind may be.
    #[error("a {kind:?} frame announces {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// The frame's kind.
        kind: Kind,
        /// The length that was announced.
        bytes: usize,
        /// The longest that is allowed.
        limit: usize,
    },
    /// A control payload does not decode.
    #[error("cannot decode {what}: {why}")]
    Payload {
        /// The message type.
        what: &'static str,
        /// The decoder's words.
        why: String,
    },
}

const MAGIC: [u8; 4] = *b"PMIL";

impl Header {
    /// A header of this kind with every other field zero.
    pub fn new(kind: Kind) -> Header {
        Header {
            kind,
            dtype: DType::F32,
            flags: Flags::default(),
            payload_bytes: 0,
            epoch: 0,
            table: TableId(0),
            chunk: 0,
            part: 0,
            rows: 0,
            clock: 0,
            version: 0,
            request: 0,
            landing: 0,
        }
    }

    /// The header's 64 bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = WIRE_VERSION;
        bytes[5] = self.kind as u8;
        bytes[6] = self.dtype as u8;
        bytes[7] = self.flags.0;
        bytes[8..12].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.table.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.part.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.rows.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.clock.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.version.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.request.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.landing.to_le_bytes());
        bytes
    }

    /// Reads a header and checks every field, the payload's length against its limit included.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if bytes[0..4] != MAGIC {
            return Err(WireError::Magic);
        }
        if bytes[4] != WIRE_VERSION {
            return Err(WireError::Version { theirs: bytes[4], ours: WIRE_VERSION });
        }
        let kind = Kind::from_byte(bytes[5])?;
        let dtype = match bytes[6] {
            0 => DType::F32,
            1 => DType::F16,
            2 => DType::Bf16,
            other => return Err(WireError::Field { field: "dtype", value: u64::from(other) }),
        };
        let header = Header {
            kind,
            dtype,
            flags: Flags(bytes[7]),
            payload_bytes: u32_at(8),
            epoch: u32_at(12),
            table: TableId(u32_at(16)),
            chunk: u32_at(20),
            part: u32_at(24),
            rows: u32_at(28),
            clock: u64_at(32),
            version: u64_at(40),
            request: u64_at(48),
            landing: u64_at(56),
        };
        let (length, limit) = (header.payload_bytes as usize, kind.max_payload_bytes());
        if length > limit {
            return Err(WireError::TooLong { kind, bytes: length, limit });
        }
        let is_elsewhere = header.flags.has(Flags::ELSEWHERE);
        let has_absent = header.flags.has(Flags::ABSENT);
        if is_elsewhere && !header.may_be_elsewhere() || has_absent && !header.may_have_absent() {
            return Err(WireError::Field { field: "flags", value: u64::from(bytes[7]) });
        }
        Ok(header)
    }

    /// Whether the payload may lie in memory that its sender can change at any time. Only elements may: what is
    /// counted, indexed by or decoded is read from a copy.
    pub fn may_be_elsewhere(&self) -> bool {
        matches!(self.kind, Kind::Init | Kind::Push | Kind::Params)
            && !self.flags.has(Flags::ROWS)
            && !self.flags.has(Flags::ENCODED)
            && !self.flags.has(Flags::ABSENT)
            && self.payload_bytes > 0
    }

    fn may_have_absent(&self) -> bool {
        self.kind == Kind::Push && !self.flags.has(Flags::ROWS)
    }
}

impl Kind {
    fn from_byte(byte: u8) -> Result<Kind, WireError> {
        Ok(match byte {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Error,
            4 => Kind::Control,
            5 => Kind::Init,
            6 => Kind::Push,
            7 => Kind::PushAck,
            8 => Kind::Pull,
            9 => Kind::Params,
            10 => Kind::Share,
            11 => Kind::Group,
            12 => Kind::Forget,
            13 => Kind::Update,
            14 => Kind::Contributors,
            15 => Kind::Image,
            16 => Kind::Entry,
            other => return Err(WireError::Field { field: "kind", value: u64::from(other) }),
        })
    }

    /// The longest payload that a frame of this kind may announce.
    pub fn max_payload_bytes(self) -> usize {
        match self {
            Kind::Hello | Kind::Welcome => limits::MAX_HELLO_BYTES,
            Kind::Control | Kind::Error => limits::MAX_CONTROL_BYTES,
            Kind::PushAck => super::ack::MAX_BYTES,
            Kind::Share | Kind::Forget => 0,
            Kind::Group => super::group::MAX_BYTES,
            Kind::Contributors => super::group::MAX_RANK_BYTES,
            Kind::Init | Kind::Push | Kind::Pull | Kind::Params | Kind::Update | Kind::Image => {
                limits::MAX_DATA_BYTES
            }
            // An input may be a control message.
            Kind::Entry => limits::MAX_CONTROL_BYTES + limits::ENTRY_PREFIX_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        (1u8..=16, 0u8..3, any::<u8>(), any::<[u32; 6]>(), any::<[u64; 4]>()).prop_map(
            |(kind, dtype, flags, a, b)| {
                let kind = Kind::from_byte(kind).unwrap();
                let mut header = Header {
                    kind,
                    dtype: [DType::F32, DType::F16, DType::Bf16][dtype as usize],
                    flags: Flags(flags),
                    payload_bytes: a[0] % (kind.max_payload_bytes() as u32 + 1),
                    epoch: a[1],
                    table: TableId(a[2]),
                    chunk: a[3],
                    part: a[4],
                    rows: a[5],
                    clock: b[0],
                    version: b[1],
                    request: b[2],
                    landing: b[3],
                };
                if !header.may_have_absent() {
                    header.flags = header.flags.without(Flags::ABSENT);
                }
                if !header.may_be_elsewhere() {
                    header.flags = header.flags.without(Flags::ELSEWHERE);
                }
                header
            },
        )
    }

    proptest! {
        #[test]
        fn encode_then_decode_is_identity(header in any_header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes in any::<[u8; HEADER_BYTES]>()) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.payload_bytes as usize <= header.kind.max_payload_bytes());
            }
        }
    }

    /// The worked example of `docs/wire.md`, byte by byte. Whoever changes one changes the other, and the version.
    #[test]
    fn the_documented_push_is_what_is_sent() {
        let header = Header {
            flags: Flags::LAST.with(Flags::WANT_PARAMS),
            payload_bytes: 32_768,
            epoch: 1,
            table: TableId(3),
            chunk: 17,
            part: 2,
            clock: 41,
            version: 1,
            request: 1234,
            ..Header::new(Kind::Push)
        };
        let dump = "\
00000000  50 4d 49 4c 0d 06 00 05  00 80 00 00 01 00 00 00
00000010  03 00 00 00 11 00 00 00  02 00 00 00 00 00 00 00
00000020  29 00 00 00 00 00 00 00  01 00 00 00 00 00 00 00
00000030  d2 04 00 00 00 00 00 00  00 00 00 00 00 00 00 00
";
        assert_eq!(hex_dump(&header.encode()), dump);
        let document = include_str!("../../../../docs/wire.md");
        assert!(document.contains(dump), "docs/wire.md does not show\n{dump}");
    }

    /// As `hexdump -C` prints it, without the characters.
    fn hex_dump(bytes: &[u8]) -> String {
        let half =
            |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
        let line = |(number, line): (usize, &[u8])| {
            let (left, right) = line.split_at(8);
            format!("{:08x}  {}  {}\n", number * 16, half(left), half(right))
        };
        bytes.chunks_exact(16).enumerate().map(line).collect()
    }

    #[test]
    fn each_wrong_field_is_named() {
        let good = Header::new(Kind::Push).encode();
        for (at, value, word) in [
            (0, b'X', "protocol"),
            (4, 77, "version 77"),
            (5, 77, "kind"),
            (6, 9, "dtype"),
            (7, 16, "flags"),
            (7, 130, "flags"),
            (11, 255, "limit"),
        ] {
            let mut bytes = good;
            bytes[at] = value;
            let error = Header::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(word), "byte {at}: {error}");
        }
    }

    #[test]
    fn only_dense_pushes_have_absent_ranges() {
        for kind in (1..=13).map(|kind| Kind::from_byte(kind).unwrap()) {
            for (flags, may) in [(Flags::ABSENT, true), (Flags::ABSENT.with(Flags::ROWS), false)] {
                let header = Header { flags, ..Header::new(kind) };
                assert_eq!(Header::decode(&header.encode()).is_ok(), may && kind == Kind::Push, "{header:?}");
            }
        }
    }

    #[test]
    fn only_elements_lie_elsewhere() {
        let elsewhere = |kind, flags: Flags, payload_bytes| {
            let header = Header { flags: flags.with(Flags::ELSEWHERE), payload_bytes, ..Header::new(kind) };
            Header::decode(&header.encode()).is_ok()
        };
        for kind in [Kind::Init, Kind::Push, Kind::Params] {
            assert!(elsewhere(kind, Flags::LAST, 32_768));
            assert!(!elsewhere(kind, Flags::ROWS, 32_768));
            assert!(!elsewhere(kind, Flags::ENCODED, 32_768));
            assert!(!elsewhere(kind, Flags::ABSENT, 32_768));
            assert!(!elsewhere(kind, Flags::LAST, 0));
        }
        for kind in [Kind::Hello, Kind::Welcome, Kind::Error, Kind::Control, Kind::Pull] {
            assert!(!elsewhere(kind, Flags::default(), 64), "{kind:?}");
        }
    }
}
