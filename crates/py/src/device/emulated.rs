//! A device that is none, so that tests pump without a GPU: its memory is the host's, and each of its streams is a thread.

#![allow(unsafe_code, reason = "copies go from address to address, as a device's do")]

use super::{Device, Event, Flag, Halves, Host, Outcome, Remote, Stream, TopK};
use paramill_core::kernels::{Bf16, Element, F16};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const CACHE_LINE: usize = 64;
const LOOK_EVERY: Duration = Duration::from_micros(50);

type Work = Box<dyn FnOnce() + Send>;

/// Streams that are threads. Stream 0 is the caller: what is asked of it is done before the call returns.
pub(crate) struct Emulated {
    streams: Mutex<Vec<Sender<Work>>>,
    marks: Arc<Marks>,
    sizes: Mutex<HashMap<usize, usize>>,
}

/// How often each event was recorded, and which of that has happened.
struct Marks {
    counts: Mutex<Vec<(u64, u64)>>,
    changed: Condvar,
}

impl Marks {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn happened(&self, event: usize, number: u64) {
        let mut counts = self.lock();
        counts[event].1 = counts[event].1.max(number);
        self.changed.notify_all();
    }

    fn wait(&self, event: usize, number: u64) {
        let counts = self.lock();
        drop(self.changed.wait_while(counts, |counts| counts[event].1 < number));
    }
}

impl Emulated {
    pub(crate) fn new() -> Emulated {
        let marks = Arc::new(Marks { counts: Mutex::default(), changed: Condvar::new() });
        Emulated { streams: Mutex::default(), marks, sizes: Mutex::default() }
    }

    fn ask(&self, stream: Stream, work: impl FnOnce() + Send + 'static) -> Outcome<()> {
        let Some(index) = stream.0.checked_sub(1) else {
            work();
            return Ok(());
        };
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams[index].send(Box::new(work)).map_err(|_| "the stream has ended".to_owned())
    }
}

impl Device for Emulated {
    fn attach(&self) -> Outcome<()> {
        Ok(())
    }

    fn new_stream(&self) -> Outcome<Stream> {
        let (sender, work) = mpsc::channel::<Work>();
        thread::Builder::new()
            .name("emulated stream".to_owned())
            .spawn(move || work.into_iter().for_each(|work| work()))
            .map_err(|error| error.to_string())?;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push(sender);
        Ok(Stream(streams.len()))
    }

    fn new_event(&self) -> Outcome<Event> {
        let mut counts = self.marks.lock();
        counts.push((0, 0));
        Ok(Event(counts.len() - 1))
    }

    fn allocate(&self, bytes: usize) -> Outcome<Host> {
        let layout = layout(bytes)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(layout) } as usize;
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner).insert(memory, bytes);
        Ok(Host(memory))
    }

    fn free(&self, memory: Host) {
        let bytes = self.sizes.lock().unwrap_or_else(PoisonError::into_inner).remove(&memory.0);
        if let Some(layout) = bytes.and_then(|bytes| layout(bytes).ok()) {
            // SAFETY: it was allocated with this layout, and is not known any more.
            unsafe { dealloc(memory.0 as *mut u8, layout) };
        }
    }

    fn pin(&self, memory: Host, _bytes: usize) -> bool {
        // As with a GPU, memory that does not begin at a page goes by memory of the pump's own.
        memory.0.is_multiple_of(4096)
    }

    fn unpin(&self, _memory: Host) {}

    fn record(&self, event: Event, stream: Stream) -> Outcome<()> {
        let number = {
            let mut counts = self.marks.lock();
            counts[event.0].0 += 1;
            counts[event.0].0
        };
        let marks = self.marks.clone();
        self.ask(stream, move || marks.happened(event.0, number))
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()> {
        let number = self.marks.lock()[event.0].0;
        let marks = self.marks.clone();
        self.ask(stream, move || marks.wait(event.0, number))
    }

    fn wait_flag(&self, stream: Stream, flag: Flag, value: u32) -> Outcome<()> {
        self.ask(stream, move || {
            while !flag.has(value) {
                thread::sleep(LOOK_EVERY);
            }
        })
    }

    fn copy_out(&self, to: Host, from: Remote, bytes: usize, stream: Stream) -> Outcome<()> {
        self.ask(stream, move || copy(from.0, to.0, bytes))
    }

    fn copy_in(&self, to: Remote, from: Host, bytes: usize, stream: Stream) -> Outcome<()> {
        self.ask(stream, move || copy(from.0, to.0, bytes))
    }

    fn choose(&self, stream: Stream, choice: &TopK) -> Outcome<()> {
        let choice = *choice;
        self.ask(stream, move || choose(&choice))
    }

    fn allocate_halves(&self, count: usize) -> Outcome<Remote> {
        self.allocate(2 * count).map(|memory| Remote(memory.0))
    }

    fn free_halves(&self, memory: Remote) {
        self.free(Host(memory.0));
    }

    fn widen(&self, stream: Stream, halves: &Halves) -> Outcome<()> {
        let Halves { halves, values, count, kind } = *halves;
        self.ask(stream, move || {
            let floats = slice::<f32>(values, count).iter_mut().zip(slice::<u16>(halves, count));
            match kind.value() {
                Halves::F16 => floats.for_each(|(value, half)| *value = F16(*half).to_f32()),
                Halves::BF16 => floats.for_each(|(value, half)| *value = Bf16(*half).to_f32()),
                _ => {}
            }
        })
    }

    fn synchronize(&self, event: Event) -> Outcome<()> {
        let number = self.marks.lock()[event.0].0;
        self.marks.wait(event.0, number);
        Ok(())
    }

    fn drain(&self, stream: Stream) -> Outcome<()> {
        let event = self.new_event()?;
        self.record(event, stream)?;
        self.synchronize(event)
    }
}

/// What the kernels do, one entry after the other. Values are not rounded.
fn choose(choice: &TopK) {
    let tiles: &[[u32; 4]] = slice(choice.tiles, choice.tile_count as usize);
    let layers: &[[u32; 4]] = slice(choice.layers, choice.layer_count as usize);
    let end = tiles.last().map_or(0, |[_, start, count, _]| (start + count) as usize);
    let (values, residual) = (slice::<f32>(choice.values, end), slice::<f32>(choice.residual, end));
    values.iter_mut().zip(&*residual).for_each(|(value, kept)| *value += kept);
    let keeps = values.iter().all(|value| value.is_finite());
    for &[tile, count, base, entries] in layers {
        let own = &tiles[tile as usize..(tile + count) as usize];
        let elements = own.iter().flat_map(|[_, start, count, _]| *start..start + count);
        let magnitude = |at: u32| values[at as usize].to_bits() & 0x7fff_ffff;
        let mut ordered: Vec<u32> = elements.clone().collect();
        // Of equal ones those that come first.
        ordered.sort_by_key(|at| (std::cmp::Reverse(magnitude(*at)), *at));
        let mut chosen = ordered[..entries as usize].to_vec();
        chosen.sort_unstable();
        let (base, entries) = (base as usize, entries as usize);
        let places = &mut slice::<u32>(choice.places, base + entries)[base..];
        let packed = &mut slice::<f32>(choice.packed, base + entries)[base..];
        if keeps {
            elements.for_each(|at| residual[at as usize] = values[at as usize]);
        }
        for ((place, value), at) in places.iter_mut().zip(packed).zip(chosen) {
            (*place, *value) = (at, values[at as usize]);
            if keeps {
                residual[at as usize] = 0.0;
            }
        }
    }
}

/// Memory of the device, which is the host's.
fn slice<'a, T>(memory: Remote, len: usize) -> &'a mut [T] {
    // SAFETY: whoever asks for work says that so many elements are there, and uses them for nothing else meanwhile.
    unsafe { std::slice::from_raw_parts_mut(memory.0 as *mut T, len) }
}

fn copy(from: usize, to: usize, bytes: usize) {
    // SAFETY: the pump keeps both sides until the copy is done; they have nothing in common.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}

fn layout(bytes: usize) -> Outcome<Layout> {
    Layout::from_size_align(bytes.max(1), CACHE_LINE).map_err(|error| error.to_string())
}
