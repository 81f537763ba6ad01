//! Parts of one buffer, written by several threads at once.

use paramill_core::region::{Divided, Partition};
use paramill_core::store::Buffer;
use std::sync::Arc;

#[test]
fn several_threads_write_parts_of_one_buffer() {
    let parts = 8;
    let elements = 4096 * parts;
    // Blocks of 64 bytes go round.
    let blocks = |part: usize| (part..elements / 16).step_by(parts).map(|block| block * 64..block * 64 + 64);
    let partition = Partition::new(elements * 4, (0..parts).map(|part| blocks(part).collect()));
    let mut divided = Divided::new(Buffer::zeroed(elements), Arc::new(partition));
    for round in 1..20u8 {
        std::thread::scope(|scope| {
            for part in 0..parts {
                let mut region = divided.lend(part).expect("it is free");
                scope.spawn(move || {
                    let ranges = region.ranges().to_vec();
                    region
                        .stretches_mut(ranges.into_iter())
                        .for_each(|bytes| bytes.fill(round * 8 + part as u8));
                });
            }
        });
        assert!(!divided.is_lent());
        let buffer = divided.reclaim().expect("all have been given back");
        for part in 0..parts {
            for block in blocks(part) {
                assert!(buffer.as_bytes()[block].iter().all(|&byte| byte == round * 8 + part as u8));
            }
        }
        let blocks = (0..parts).map(|part| blocks(part).collect());
        divided = Divided::new(buffer, Arc::new(Partition::new(elements * 4, blocks)));
    }
}
