//! Memory: copies, and the least that an optimizer's step can do.

use anyhow::{Result, anyhow};
use paramill_core::kernels;
use paramill_core::store::Buffer;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Elements in each array of each thread: more than any cache holds.
const ELEMENTS: usize = 16 << 20;

/// Bytes copied per second on all cores, from memory to memory.
pub(in super::super) fn copy(time: Duration) -> Result<f64> {
    on_all_cores(time, |to, from| to.copy_from_slice(from))
}

/// Bytes of gradient per second on all cores in `w -= lr * g`, from memory.
pub(in super::super) fn update(time: Duration) -> Result<f64> {
    on_all_cores(time, |parameters, gradient| kernels::add_scaled(parameters, gradient, -1e-9))
}

/// Bytes of the second array per second, in all.
fn on_all_cores(time: Duration, work: impl Fn(&mut [f32], &[f32]) + Sync) -> Result<f64> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let start = Barrier::new(cores);
    let one = || {
        let (mut to, mut from) = (Buffer::zeroed(ELEMENTS), Buffer::zeroed(ELEMENTS));
        from.as_mut_slice().fill(1.0);
        work(to.as_mut_slice(), from.as_slice());
        start.wait();
        let (began, mut passes) = (Instant::now(), 0u32);
        while began.elapsed() < time || passes == 0 {
            work(std::hint::black_box(to.as_mut_slice()), std::hint::black_box(from.as_slice()));
            passes += 1;
        }
        f64::from(passes) * (ELEMENTS * 4) as f64 / began.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(one)).collect();
        let rates = threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked")));
        rates.sum()
    })
}
