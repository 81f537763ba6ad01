//! Parameters in shorter elements, for answers that travel so.

use crate::codec::half;
use crate::kernels;
use crate::store::Buffer;
use crate::table::Layout;
use crate::types::Clock;
use crate::wire::DType;

/// A table's parameters as halves. Each chunk is made once for a state of its parameters, however many workers pull it, and
/// is sent from here.
///
/// The memory stays when answers go over to another codec: frames that wait to be sent still refer to it.
#[derive(Debug)]
pub(super) struct Halves {
    values: Buffer,
    /// The states that chunks were made of.
    made: Vec<Option<ChunkState>>,
}

/// Tells two states of a chunk's parameters apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkState {
    pub(super) version: Clock,
    /// Steps of its table that belong to no round.
    pub(super) steps_outside_rounds: u64,
}

impl Halves {
    /// Without any: memory is taken with the first.
    pub(super) fn new() -> Halves {
        Halves { values: Buffer::zeroed(0), made: Vec::new() }
    }

    /// Forgets what was made: the next answers have another type, or other parameters.
    pub(super) fn clear(&mut self) {
        self.made.iter_mut().for_each(|made| *made = None);
    }

    /// Makes the halves of a chunk, if they are not those of this state. `false` when the parameters are not finite: they
    /// travel as they are, and what is here stays.
    pub(super) fn make(
        &mut self,
        layout: &Layout,
        index: usize,
        dtype: DType,
        state: ChunkState,
        parameters: &[f32],
    ) -> bool {
        if self.made.is_empty() {
            // Two halves in a word.
            self.values = Buffer::zeroed(layout.elements().div_ceil(2));
            self.made = vec![None; layout.chunks().len()];
        }
        if self.made[index] == Some(state) {
            return true;
        }
        if !kernels::all_finite(parameters) {
            return false;
        }
        let chunk = layout.chunks()[index].range();
        half::write(dtype, parameters, &mut self.values.as_mut_bytes()[2 * chunk.start..2 * chunk.end]);
        self.made[index] = Some(state);
        true
    }

    /// The version of a chunk, if its halves are here.
    pub(super) fn version_of(&self, index: usize) -> Option<Clock> {
        Some(self.made.get(index)?.as_ref()?.version)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.values.as_bytes()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.values.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Chunk, TableSpec};
    use crate::types::{ServerId, ShardId};

    #[test]
    fn a_chunk_is_made_once_for_each_state_of_its_parameters() {
        let shard = ShardId { server: ServerId(0), core: 0 };
        let chunks = [(0, 3), (3, 2)].map(|(start, len)| Chunk { shard, start, len });
        let layout = Layout::new(TableSpec::dense("w", [5]), (0..).zip(chunks));
        let mut halves = Halves::new();
        let state = |version| ChunkState { version, steps_outside_rounds: 0 };
        let make = |halves: &mut Halves, version, values: [f32; 2]| {
            halves.make(&layout, 1, DType::Bf16, state(version), &values)
        };
        assert_eq!(halves.version_of(1), None);
        assert!(make(&mut halves, 4, [1.0, -2.0]));
        let made = [0x3f80u16, 0xc000];
        assert_eq!(halves.bytes()[6..10], *bytemuck::cast_slice::<u16, u8>(&made));
        // The same state is not looked at again, and what is not finite does not get here.
        assert!(make(&mut halves, 4, [f32::NAN; 2]));
        assert!(!make(&mut halves, 5, [f32::NAN; 2]));
        assert_eq!(halves.bytes()[6..10], *bytemuck::cast_slice::<u16, u8>(&made));
        assert_eq!((halves.version_of(0), halves.version_of(1)), (None, Some(4)));
        halves.clear();
        assert!(make(&mut halves, 4, [0.0; 2]));
        assert_eq!(halves.bytes()[6..10], [0; 4]);
    }
}
