//! What the pump asks of a device: copies on streams, and events and flags that order them.

mod cuda;
mod emulated;

pub(crate) use cuda::Cuda;
pub(crate) use emulated::Emulated;

use std::sync::atomic::{AtomicU32, Ordering};

/// A queue of work on the device, by the number that the device's own interface has for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Stream(pub(crate) usize);

/// A mark in a stream, likewise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Event(pub(crate) usize);

/// Memory of the host, by its address. The device reads and writes it while others wait for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Host(pub(crate) usize);

/// Memory of the device, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote(pub(crate) usize);

/// A sentence of the device about what it refused.
pub(crate) type Outcome<T> = Result<T, String>;

/// A device with memory of its own. All methods are required.
///
/// Work on one stream MUST be done in the order in which it was asked for, and work on two streams side by side. Whatever is
/// asked for on a stream MUST return without waiting for the device, except on the stream 0 of a device whose work is done by
/// the caller.
pub(crate) trait Device: Send + Sync {
    /// Makes the device the calling thread's.
    fn attach(&self) -> Outcome<()>;

    fn new_stream(&self) -> Outcome<Stream>;

    fn new_event(&self) -> Outcome<Event>;

    /// Memory that the device copies from and to by itself, filled with zeros. It MUST stay until [`Device::free`].
    fn allocate(&self, bytes: usize) -> Outcome<Host>;

    /// Gives it back.
    fn free(&self, memory: Host);

    /// Makes memory of others such that the device copies from and to it by itself; whether it is.
    fn pin(&self, memory: Host, bytes: usize) -> bool;

    /// Undoes that.
    fn unpin(&self, memory: Host);

    /// Marks what was asked of the stream so far.
    fn record(&self, event: Event, stream: Stream) -> Outcome<()>;

    /// What is asked of the stream from now on waits for the event as it was recorded last.
    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()>;

    /// What is asked of the stream from now on waits until the flag has this value, or one beyond it.
    fn wait_flag(&self, stream: Stream, flag: Flag, value: u32) -> Outcome<()>;

    /// Copies from the device's memory into the host's.
    fn copy_out(&self, to: Host, from: Remote, bytes: usize, stream: Stream) -> Outcome<()>;

    /// Copies from the host's memory into the device's.
    fn copy_in(&self, to: Remote, from: Host, bytes: usize, stream: Stream) -> Outcome<()>;

    /// Chooses the largest entries of layers and packs them, after what was asked of the stream so far.
    fn choose(&self, stream: Stream, choice: &TopK) -> Outcome<()>;

    /// Memory of the device's own for so many halves that it can widen. It MUST stay until [`Device::free_halves`]. This may wait for
    /// all streams.
    fn allocate_halves(&self, count: usize) -> Outcome<Remote>;

    /// Gives it back.
    fn free_halves(&self, memory: Remote);

    /// Makes floats of halves, after what was asked of the stream so far.
    fn widen(&self, stream: Stream, halves: &Halves) -> Outcome<()>;

    /// Waits until the event has happened.
    fn synchronize(&self, event: Event) -> Outcome<()>;

    /// Waits until all that was asked of the stream is done.
    fn drain(&self, stream: Stream) -> Outcome<()>;
}

/// Halves that are to become floats, in memory of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Halves {
    pub(crate) halves: Remote,
    pub(crate) values: Remote,
    pub(crate) count: usize,
    /// What they are when it is their turn: [`Halves::NONE`] and then nothing is done, [`Halves::F16`] or [`Halves::BF16`].
    pub(crate) kind: Flag,
}

impl Halves {
    pub(crate) const NONE: u32 = 0;
    pub(crate) const F16: u32 = 1;
    pub(crate) const BF16: u32 = 2;
}

/// A choice of the largest entries of each layer, in memory of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopK {
    /// Gradients; what was kept is added to them.
    pub(crate) values: Remote,
    /// What was not sent yet.
    pub(crate) residual: Remote,
    /// Parts of layers: four words each, the layer, the first element, and how many.
    pub(crate) tiles: Remote,
    pub(crate) tile_count: u32,
    /// Four words each: the first tile, how many, where its entries are packed, and how many these are.
    pub(crate) layers: Remote,
    pub(crate) layer_count: u32,
    /// [`TopK::work_words`] words, zeros before they are used first.
    pub(crate) work: Remote,
    /// Where places and values are put.
    pub(crate) places: Remote,
    pub(crate) packed: Remote,
    /// What values are rounded to: 1 for f16, 2 for bf16.
    pub(crate) half: u32,
}

impl TopK {
    pub(crate) const BINS: usize = 2048;
    /// Elements of a tile at most.
    pub(crate) const TILE: u32 = 16384;

    /// How many words of memory the choice needs besides.
    pub(crate) fn work_words(tiles: usize, layers: usize) -> usize {
        layers * (Self::BINS + 2) + tiles * 2 + 1
    }
}

/// A number in the host's memory that streams wait for. The thread that raises it asks nothing of the device: a call that holds
/// the device's locks while it waits for a stream cannot stop it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flag(Host);

#[allow(unsafe_code, reason = "the flag is in memory that the device allocated")]
impl Flag {
    /// A flag in memory of [`Device::allocate`].
    pub(crate) fn at(memory: Host) -> Flag {
        Flag(memory)
    }

    pub(crate) fn address(self) -> usize {
        self.0.0
    }

    /// Lets go of those who wait for this value. What was written to memory before is seen by them.
    pub(crate) fn raise(self, value: u32) {
        // SAFETY: `Device::allocate` returns memory that is aligned to a cache line and stays until it is freed, which is
        // done when no thread and no stream uses it any more.
        unsafe { AtomicU32::from_ptr(self.0.0 as *mut u32) }.store(value, Ordering::Release);
    }

    /// Its value.
    pub(crate) fn value(self) -> u32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.0.0 as *mut u32) }.load(Ordering::Acquire)
    }

    /// Whether it has this value or one beyond it, counted around the end of the numbers.
    pub(crate) fn has(self, value: u32) -> bool {
        self.value().wrapping_sub(value) as i32 >= 0
    }
}
