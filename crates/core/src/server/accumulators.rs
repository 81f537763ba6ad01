//! Memory that sums of gradients are made in.

use crate::codec::Content;
use crate::kernels::Values;
use crate::store::Buffer;

/// Arrays that sums of chunks are made in, for all dense tables of a shard. The one that was given back last is taken
/// first: it is still in the cache.
#[derive(Debug, Default)]
pub(super) struct Accumulators {
    /// Those for up to 2^n elements.
    free: Vec<Vec<Buffer>>,
    /// How many are in use.
    taken: usize,
}

impl Accumulators {
    pub(super) fn take(&mut self, elements: usize) -> Buffer {
        self.taken += 1;
        let elements = elements.next_power_of_two();
        let free = self.free.get_mut(elements.ilog2() as usize).and_then(Vec::pop);
        free.unwrap_or_else(|| Buffer::zeroed(elements))
    }

    pub(super) fn give_back(&mut self, accumulator: Option<Buffer>) {
        let Some(accumulator) = accumulator else { return };
        assert!(self.taken > 0, "an accumulator is given back once");
        self.taken -= 1;
        let class = accumulator.len().ilog2() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(accumulator);
    }

    /// Calls `visit` with a value for every entry. Where only some are there, the others are filled in on an accumulator.
    pub(super) fn with_whole(&mut self, content: Content<'_>, visit: impl FnOnce(Values<'_>)) {
        let Content::Whole(values) = content else {
            let mut whole = self.take(content.len());
            let values = &mut whole.as_mut_slice()[..content.len()];
            content.copy_to(values);
            visit(Values::F32(values));
            return self.give_back(Some(whole));
        };
        visit(values);
    }

    /// How many are in use.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.free.iter().flatten().map(Buffer::memory_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_that_was_given_back_last_is_taken_first() {
        let mut accumulators = Accumulators::default();
        let (mut first, second) = (accumulators.take(5), accumulators.take(7));
        assert_eq!((first.len(), second.len(), accumulators.taken()), (8, 8, 2));
        first.as_mut_slice()[0] = 3.0;
        let bytes = first.memory_bytes();
        assert_eq!(accumulators.memory_bytes(), 0, "those in use are counted where they are used");
        accumulators.give_back(Some(second));
        accumulators.give_back(Some(first));
        assert_eq!(accumulators.memory_bytes(), 2 * bytes);
        accumulators.give_back(None);
        assert_eq!(accumulators.take(8).as_slice()[0], 3.0);
        // Buffers of another size are kept apart.
        assert_eq!((accumulators.take(9).len(), accumulators.taken()), (16, 2));
    }
}
