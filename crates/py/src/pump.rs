//! Moves gradients from a device to the servers and parameters back, beside Python and without its lock.
//!
//! Python asks for copies at the moment at which a bucket's gradients are ready, and at the end of an iteration for those of all
//! new parameters; the device does them in order, on a stream for each direction. A copy of parameters waits for a flag, and
//! everything that is computed after the iteration waits for these copies. So Python goes on at once, and the device waits for the
//! servers. Two threads do the rest: one hands gradients to the servers when they have left the device, the other raises the flags
//! of a bucket as its parameters come, or when it failed.

use crate::device::{Cuda, Device, Emulated, Event, Flag, Halves, Host, Outcome, Remote, Stream, TopK};
use crate::errors::{client, raise};
use crate::job::Job;
use crate::slab::{Address, Slab, Underway, begin};
use crate::waiting::{check_process, duration, timed, until_due};
use paramill_core::standstill;
use paramill_core::wire::Cause;
use paramill_node::client::{self as node, ClientError, DType, Prepared, Share, WorkerError};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread looks at one exchange before it looks whether it is to end.
const LOOK_UP_EVERY: Duration = Duration::from_millis(100);
/// A lane's memory that the device reads and writes: flags, and how many entries a codec chose.
const WORDS_BYTES: usize = 64;
const COUNT_AT: usize = 0;
const COUNT_BYTES: usize = 8;
const FLAGS_AT: usize = 8;
const FLAG_BYTES: usize = 4;
const KIND_AT: usize = 24;
/// A bucket of so many bytes is copied in parts, so that most of it is on the device when its last parameters come.
const LARGE_BYTES: usize = 32 << 20;
/// Parts of a large bucket.
const PARTS: usize = 4;
const _: () = assert!(FLAGS_AT + PARTS * FLAG_BYTES <= KIND_AT && KIND_AT + FLAG_BYTES <= WORDS_BYTES);
const ELEMENT_BYTES: usize = 4;
const HALF_BYTES: usize = 2;
const PAGE_BYTES: usize = 4096;

/// Carries the buckets of a job that are on one device.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Pump {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    process: u32,
}

struct Shared {
    job: Arc<node::Job>,
    device: Box<dyn Device>,
    timeout: Duration,
    outward: Stream,
    inward: Stream,
    /// The end of what was computed with the parameters that are about to be replaced.
    used: Event,
    arrived: Event,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lanes: Vec<(Arc<Lane>, Progress)>,
    errands: VecDeque<Errand>,
    /// Whether the sender is at an errand, which is not in the list any more.
    is_sending: bool,
    under_way: VecDeque<UnderWay>,
    failures: Vec<Failure>,
    is_closing: bool,
}

/// What stays the same of a bucket.
struct Lane {
    slab: Py<Slab>,
    incoming: Remote,
    words: Host,
    /// In the order in which they come.
    parts: Vec<Part>,
    /// Where parameters are widened from, if they came as halves when the bucket was added. It is not made later, when streams wait for
    /// what this would wait for.
    halves: Option<Remote>,
    ready: Event,
    copied: Event,
    memory: Mutex<Memory>,
}

/// Parameters that are copied together.
struct Part {
    elements: Vec<Range<usize>>,
    /// Has the number of the last submission whose parameters are here, or will not come.
    flag: Flag,
}

/// Submissions are counted, and these are the numbers of the last ones.
#[derive(Default, Clone, Copy)]
struct Progress {
    submitted: u32,
    /// Whose parameters were asked for.
    turned: u32,
    /// Which are over, well or not.
    done: u32,
    /// An answer that came after its time: the device went on without it.
    is_late: bool,
}

/// A slab's memory as the device sees it.
struct Memory {
    address: Address,
    gradient: Region,
    values: Region,
    /// Whether the parameters that come next are asked for as halves.
    asks_halves: bool,
    /// Whether a codec encodes them: what comes again after a connection was lost may then be other bits.
    is_encoded: bool,
    /// What an exchange that failed left: the device may still copy from there.
    former: Vec<Region>,
}

struct Region {
    slab: Host,
    bytes: usize,
    /// Memory of the pump's own, where the slab's cannot be pinned.
    own: Option<Host>,
}

enum Errand {
    Send { lane: usize, content: Content, codec: String, absent: Vec<(usize, usize)> },
    Clock,
}

/// What a bucket sends.
#[derive(Clone, Copy)]
enum Content {
    Gradient,
    Prepared(Prepared),
    /// Entries of which the device knows how many there are: their places, their values, and all elements.
    Counted {
        places: Remote,
        values: Remote,
        all: Remote,
    },
}

struct UnderWay {
    lane: usize,
    exchange: Arc<Underway>,
}

struct Failure {
    lane: usize,
    /// Whether the gradient was refused here, and the worker took part without one.
    is_refusal: bool,
    why: Why,
}

enum Why {
    Client(ClientError),
    Device(String),
}

#[pymethods]
impl Pump {
    /// A pump for the GPU with this number, or for an emulated device if that is negative.
    #[new]
    fn new(job: &Job, device: i32, timeout: f64) -> PyResult<Pump> {
        let refused = |why: String| raise("ParamillError", why);
        let device: Box<dyn Device> = match device {
            ..0 => Box::new(Emulated::new()),
            number => Box::new(Cuda::new(number).map_err(refused)?),
        };
        let shared = Shared::new(job.job()?, device, duration(timeout)?).map_err(refused)?;
        let shared = Arc::new(shared);
        let threads = [
            ("paramill sender", Shared::send_all as fn(&Shared)),
            ("paramill receiver", Shared::receive_all),
        ]
        .map(|(name, run)| {
            let shared = shared.clone();
            thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared))
        });
        let threads =
            threads.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| refused(error.to_string()))?;
        Ok(Pump { shared, threads: Mutex::new(threads), process: std::process::id() })
    }

    /// Adds a bucket, whose parameters are to be put at this address of the device. Its number.
    fn add(&self, slab: Py<Slab>, incoming: usize) -> PyResult<usize> {
        check_process(self.process)?;
        let address = slab.get().address()?;
        let refused = |why: String| raise("ParamillError", why);
        let lane = self.shared.new_lane(slab, Remote(incoming), address).map_err(refused)?;
        let mut state = self.shared.lock();
        state.lanes.push((Arc::new(lane), Progress::default()));
        Ok(state.lanes.len() - 1)
    }

    /// Sends what is ready on `stream`: `parts` are addresses and bytes on the device, which follow each other in the slab's
    /// memory. They are a `gradient`, or what a codec of this text made of it: `halves`, all `chosen` entries, `count`
    /// `places` and their values; or `counted`: the number of entries, then places, values and all elements.
    ///
    /// The bucket's last exchange must be over; it is waited for.
    #[allow(clippy::too_many_arguments, reason = "one call for each bucket, as cheap as it can be")]
    fn submit(
        &self,
        py: Python<'_>,
        lane: usize,
        stream: usize,
        content: &str,
        parts: Vec<(usize, usize)>,
        count: usize,
        codec: String,
        absent: Vec<(usize, usize)>,
    ) -> PyResult<()> {
        check_process(self.process)?;
        let part = |index: usize| parts.get(index).map(|part| Remote(part.0)).unwrap_or(Remote(0));
        let (content, copied) = match content {
            "gradient" => (Content::Gradient, parts.len()),
            "halves" => (Content::Prepared(Prepared::Halves), parts.len()),
            "chosen" => (Content::Prepared(Prepared::Chosen), parts.len()),
            "places" => (Content::Prepared(Prepared::Places { count }), parts.len()),
            "counted" => (Content::Counted { places: part(1), values: part(2), all: part(3) }, 1),
            other => return Err(raise("OrderError", format!("there is no content `{other}`"))),
        };
        let is_free = |state: &State| state.lanes[lane].1.is_over();
        self.until(py, "a bucket's last exchange", |state| is_free(state) || !state.failures.is_empty())?;
        if !is_free(&self.shared.lock()) {
            let failure = self.shared.lock().failures.pop();
            return Err(failure.map_or_else(|| raise("OrderError", "a bucket is under way"), Failure::error));
        }
        let outcome = py.detach(|| {
            self.shared.copy_out(
                lane,
                Stream(stream),
                matches!(content, Content::Counted { .. }),
                &parts[..copied],
            )?;
            let mut state = self.shared.lock();
            let progress = &mut state.lanes[lane].1;
            progress.submitted = progress.submitted.wrapping_add(1);
            state.errands.push_back(Errand::Send { lane, content, codec, absent });
            self.shared.changed.notify_all();
            Ok(())
        });
        outcome.map_err(|why: String| raise("ParamillError", why))
    }

    /// Elements of a tile at most, and words of memory that a choice needs besides.
    #[staticmethod]
    fn choice_needs(tiles: usize, layers: usize) -> (u32, usize) {
        (TopK::TILE, TopK::work_words(tiles, layers))
    }

    /// Chooses the largest entries of layers, which are rounded to halves of kind 1 (f16) or 2 (bf16) or are not. The words of
    /// `tiles` and `layers` are those of [`TopK`], and the others are addresses on the device.
    #[allow(clippy::too_many_arguments, reason = "one call for each bucket, as cheap as it can be")]
    fn choose(
        &self,
        py: Python<'_>,
        stream: usize,
        values: usize,
        residual: usize,
        tiles: (usize, u32),
        layers: (usize, u32),
        work: usize,
        places: usize,
        packed: usize,
        half: u32,
    ) -> PyResult<()> {
        check_process(self.process)?;
        let [values, residual, work, places, packed] = [values, residual, work, places, packed].map(Remote);
        let choice = TopK {
            values,
            residual,
            tiles: Remote(tiles.0),
            tile_count: tiles.1,
            layers: Remote(layers.0),
            layer_count: layers.1,
            work,
            places,
            packed,
            half,
        };
        let device = &self.shared.device;
        let outcome = py.detach(|| device.attach().and_then(|()| device.choose(Stream(stream), &choice)));
        outcome.map_err(|why| raise("ParamillError", why))
    }

    /// Ends the iteration: new parameters of all buckets that were submitted replace those that were computed with on `stream`
    /// until now. With `clock` the job's iteration ends too, once their gradients have left.
    fn turn(&self, py: Python<'_>, stream: usize, clock: bool) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| self.shared.turn(Stream(stream), clock)).map_err(|why| raise("ParamillError", why))
    }

    /// What is computed on `stream` from now on has the parameters of the last [`Pump::turn`].
    fn enter(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| self.shared.enter(Stream(stream))).map_err(|why| raise("ParamillError", why))
    }

    /// Waits until all gradients have left.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        self.until(py, "gradients to leave the device", State::has_left)
    }

    /// Waits until all is over whose parameters were asked for, or something failed. Work on `stream` has these parameters.
    fn wait(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        check_process(self.process)?;
        self.until(py, "new parameters", |state| state.is_settled() || !state.failures.is_empty())?;
        py.detach(|| self.shared.bring_late(Stream(stream))).map_err(|why| raise("ParamillError", why))
    }

    /// What failed since this was asked last: the bucket, whether its gradient was refused here, and the error.
    fn failures(&self, py: Python<'_>) -> Vec<(usize, bool, Py<PyAny>)> {
        let failures = std::mem::take(&mut self.shared.lock().failures);
        let told = failures.into_iter().map(|failure| {
            let (lane, is_refusal) = (failure.lane, failure.is_refusal);
            (lane, is_refusal, failure.error().into_value(py).into_any())
        });
        told.collect()
    }

    /// Ends the threads, and lets go of the slabs' memory. What is under way is not waited for.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        py.detach(|| self.end());
        Ok(())
    }
}

impl Pump {
    /// Waits until the state is as wished. The servers' time-outs are failures; this one is of the device.
    fn until(
        &self,
        py: Python<'_>,
        what: &str,
        is_met: impl Fn(&State) -> bool + Send + Sync,
    ) -> PyResult<()> {
        if is_met(&self.shared.lock()) {
            return Ok(());
        }
        let limit = self.shared.timeout.saturating_mul(2);
        let mut is_over = false;
        until_due(py, limit, |slice| {
            let state = self.shared.lock();
            let waited = self.shared.changed.wait_timeout_while(state, slice, |state| !is_met(state));
            is_over = is_met(&waited.unwrap_or_else(PoisonError::into_inner).0);
            Ok(is_over)
        })?;
        if is_over {
            return Ok(());
        }
        Err(raise(
            "DeadlineError",
            format!("timed out after {:.1} s waiting for {what}", limit.as_secs_f64()),
        ))
    }

    fn end(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        if threads.is_empty() {
            return;
        }
        self.shared.let_go();
        // A thread that panicked is at its end too.
        threads.into_iter().for_each(|thread| drop(thread.join()));
        self.shared.release();
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // In a forked child there are no threads to end.
        if std::process::id() == self.process {
            self.end();
        } else {
            std::mem::forget(self.shared.clone());
        }
    }
}

impl Shared {
    fn new(job: Arc<node::Job>, device: Box<dyn Device>, timeout: Duration) -> Outcome<Shared> {
        let (outward, inward) = (device.new_stream()?, device.new_stream()?);
        let (used, arrived) = (device.new_event()?, device.new_event()?);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Shared { job, device, timeout, outward, inward, used, arrived, state, changed };
        // A driver that cannot wait for flags says so now.
        let words = shared.device.allocate(WORDS_BYTES)?;
        let flag = flag_at(words, 0);
        let outcome = shared.device.wait_flag(inward, flag, 0).and_then(|()| shared.device.drain(inward));
        shared.device.free(words);
        outcome.map(|()| shared)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lane(&self, lane: usize) -> Arc<Lane> {
        self.lock().lanes[lane].0.clone()
    }

    fn new_lane(&self, slab: Py<Slab>, incoming: Remote, address: Address) -> Outcome<Lane> {
        self.device.attach()?;
        let memory = Mutex::new(self.memory(address)?);
        let words = self.device.allocate(WORDS_BYTES)?;
        let (ready, copied) = (self.device.new_event()?, self.device.new_event()?);
        let count = if address.len * ELEMENT_BYTES >= LARGE_BYTES { PARTS } else { 1 };
        let parts = slab.get().answer_parts(count).map_err(|error| error.to_string())?;
        let part = |(number, elements)| Part { elements, flag: flag_at(words, number) };
        let parts = parts.into_iter().enumerate().map(part).collect();
        let allocate = || self.device.allocate_halves(address.len).ok();
        let comes_as = slab.get().answer_type().map_err(|error| error.to_string())?;
        let halves = is_half(comes_as).then(allocate).flatten();
        Ok(Lane { slab, incoming, words, parts, halves, ready, copied, memory })
    }

    fn memory(&self, address: Address) -> Outcome<Memory> {
        let bytes = address.len * ELEMENT_BYTES;
        let region = |start: *const f32| -> Outcome<Region> {
            let slab = Host(start as usize);
            // Memory that begins at a page is the worker's own, and shared with servers of this host: it is pinned where it is.
            // What is smaller has others on its page.
            let is_pinned = slab.0.is_multiple_of(PAGE_BYTES) && self.device.pin(slab, bytes);
            let own = if is_pinned { None } else { Some(self.device.allocate(bytes)?) };
            Ok(Region { slab, bytes, own })
        };
        let (gradient, values) = (region(address.gradient)?, region(address.values)?);
        Ok(Memory { address, gradient, values, asks_halves: false, is_encoded: false, former: Vec::new() })
    }

    /// Asks for the copies of a bucket that is ready on `stream`.
    fn copy_out(
        &self,
        lane: usize,
        stream: Stream,
        is_counted: bool,
        parts: &[(usize, usize)],
    ) -> Outcome<()> {
        let (lane, device) = (self.lane(lane), &self.device);
        device.attach()?;
        let mut memory = lane.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let address = lane.slab.get().address().map_err(|error| error.to_string())?;
        if address != memory.address {
            let former = std::mem::replace(&mut *memory, self.memory(address)?);
            memory.former.extend([former.gradient, former.values].into_iter().chain(former.former));
        }
        let comes_as = lane.slab.get().answer_type().map_err(|error| error.to_string())?;
        let asks_halves = lane.halves.is_some() && is_half(comes_as);
        lane.slab.get().ask_halves(asks_halves).map_err(|error| error.to_string())?;
        (memory.asks_halves, memory.is_encoded) = (asks_halves, comes_as.is_none());
        let room = if is_counted { COUNT_BYTES } else { memory.gradient.bytes };
        if parts.iter().map(|part| part.1).sum::<usize>() > room {
            return Err("more is to be sent than the slab has room for".to_owned());
        }
        device.record(lane.ready, stream)?;
        device.wait_event(self.outward, lane.ready)?;
        let mut to = if is_counted { lane.words.0 + COUNT_AT } else { memory.gradient.start().0 };
        for (from, bytes) in parts {
            device.copy_out(Host(to), Remote(*from), *bytes, self.outward)?;
            to += bytes;
        }
        device.record(lane.copied, self.outward)
    }

    fn turn(&self, stream: Stream, clock: bool) -> Outcome<()> {
        let mut asked = Vec::new();
        {
            let mut state = self.lock();
            for (lane, progress) in &mut state.lanes {
                if progress.turned != progress.submitted {
                    progress.turned = progress.submitted;
                    asked.push((lane.clone(), progress.submitted));
                }
            }
            if clock {
                state.errands.push_back(Errand::Clock);
            }
            self.changed.notify_all();
        }
        let device = &self.device;
        device.attach()?;
        device.record(self.used, stream)?;
        device.wait_event(self.inward, self.used)?;
        for (lane, number) in &asked {
            for part in &lane.parts {
                device.wait_flag(self.inward, part.flag, *number)?;
                self.copy_in(lane, part)?;
            }
            self.widen(lane)?;
        }
        device.record(self.arrived, self.inward)
    }

    fn enter(&self, stream: Stream) -> Outcome<()> {
        self.device.attach()?;
        self.device.wait_event(stream, self.arrived)
    }

    /// Copies of answers that the device did not wait for to the end.
    fn bring_late(&self, stream: Stream) -> Outcome<()> {
        let late: Vec<Arc<Lane>> = {
            let mut state = self.lock();
            let over = state.lanes.iter_mut().filter(|(_, progress)| progress.is_late && progress.is_over());
            over.map(|(lane, progress)| {
                progress.is_late = false;
                lane.clone()
            })
            .collect()
        };
        self.device.attach()?;
        if !late.is_empty() {
            for lane in &late {
                lane.parts.iter().try_for_each(|part| self.copy_in(lane, part))?;
                self.widen(lane)?;
            }
            self.device.record(self.arrived, self.inward)?;
        }
        self.device.wait_event(stream, self.arrived)
    }

    /// Copies parameters to where they belong, or to where they are widened from.
    fn copy_in(&self, lane: &Lane, part: &Part) -> Outcome<()> {
        let (from, halves) = {
            let memory = lane.memory.lock().unwrap_or_else(PoisonError::into_inner);
            (memory.values.start(), lane.halves_of(&memory))
        };
        let (to, width) = halves.map_or((lane.incoming, ELEMENT_BYTES), |halves| (halves, HALF_BYTES));
        part.elements.iter().try_for_each(|range| {
            let (start, bytes) = (range.start * width, range.len() * width);
            self.device.copy_in(Remote(to.0 + start), Host(from.0 + start), bytes, self.inward)
        })
    }

    /// Widens what came as halves.
    fn widen(&self, lane: &Lane) -> Outcome<()> {
        let memory = lane.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(halves) = lane.halves_of(&memory) else { return Ok(()) };
        let (values, count, kind) = (lane.incoming, memory.address.len, lane.kind());
        self.device.widen(self.inward, &Halves { halves, values, count, kind })
    }

    /// The first thread: hands gradients to the servers in the order in which they were submitted.
    fn send_all(&self) {
        let attached = self.device.attach();
        loop {
            let mut state = self.lock();
            state.is_sending = false;
            self.changed.notify_all();
            let wait = |state: &mut State| state.errands.is_empty() && !state.is_closing;
            let mut state = self.changed.wait_while(state, wait).unwrap_or_else(PoisonError::into_inner);
            if state.is_closing {
                return;
            }
            let errand = state.errands.pop_front();
            state.is_sending = true;
            drop(state);
            match errand {
                Some(Errand::Send { lane, content, codec, absent }) => {
                    let sent = attached.clone().map_err(Why::Device);
                    match sent.and_then(|()| self.send(lane, content, codec, absent)) {
                        Ok(exchange) => self.lock().under_way.push_back(UnderWay { lane, exchange }),
                        Err(why) => self.fail(lane, why),
                    }
                }
                Some(Errand::Clock) => self.job.clock(),
                None => {}
            }
        }
    }

    fn send(
        &self,
        number: usize,
        content: Content,
        codec: String,
        absent: Vec<(usize, usize)>,
    ) -> Result<Arc<Underway>, Why> {
        let lane = self.lane(number);
        self.device.synchronize(lane.copied)?;
        let prepared = match content {
            Content::Gradient => None,
            Content::Prepared(prepared) => Some(prepared),
            Content::Counted { places, values, all } => Some(self.copy_counted(&lane, places, values, all)?),
        };
        lane.memory.lock().unwrap_or_else(PoisonError::into_inner).gradient.write_back();
        let slab = lane.slab.get();
        if let Some(prepared) = prepared {
            slab.prepare(prepared, codec.clone())?;
        }
        if !absent.is_empty() {
            slab.leave_out(absent)?;
        }
        match begin(&self.job, &[slab]) {
            Err(error) if is_non_finite(&error) => {
                // The others wait for this worker: it takes part as if it had no gradients, and the next step tells.
                let failure = Failure { lane: number, is_refusal: true, why: error.into() };
                self.lock().failures.push(failure);
                slab.clear()?;
                match prepared {
                    Some(Prepared::Places { .. }) => slab.prepare(Prepared::Places { count: 0 }, codec)?,
                    Some(prepared) => slab.prepare(prepared, codec)?,
                    None => {}
                }
                let len = lane.memory.lock().unwrap_or_else(PoisonError::into_inner).address.len;
                slab.leave_out(vec![(0, len)])?;
                Ok(begin(&self.job, &[slab])?)
            }
            outcome => Ok(outcome?),
        }
    }

    /// Copies as many entries as there are; all elements if their places would take more room.
    fn copy_counted(&self, lane: &Lane, places: Remote, values: Remote, all: Remote) -> Outcome<Prepared> {
        let count = lane.count();
        let memory = lane.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, bytes) = (memory.gradient.start(), count * ELEMENT_BYTES);
        let is_dense = 2 * bytes > memory.gradient.bytes;
        if is_dense {
            self.device.copy_out(start, all, memory.gradient.bytes, self.outward)?;
        } else if count > 0 {
            self.device.copy_out(start, places, bytes, self.outward)?;
            self.device.copy_out(Host(start.0 + bytes), values, bytes, self.outward)?;
        }
        self.device.record(lane.copied, self.outward)?;
        self.device.synchronize(lane.copied)?;
        Ok(if is_dense { Prepared::Chosen } else { Prepared::Places { count } })
    }

    /// The second thread: raises flags as answers come, in the order in which the device waits for them.
    fn receive_all(&self) {
        loop {
            let wait = |state: &mut State| state.under_way.is_empty() && !state.is_closing;
            let state = self.changed.wait_while(self.lock(), wait).unwrap_or_else(PoisonError::into_inner);
            let Some((number, exchange)) = state.first_under_way() else { return };
            drop(state);
            self.receive(number, &exchange);
        }
    }

    /// Waits for an answer until it is there, the pump is closed, or its time is over. Then the device goes on without it, and
    /// it stays the one that is waited for.
    fn receive(&self, number: usize, exchange: &Underway) {
        let (lane, submission) = {
            let state = self.lock();
            let (lane, progress) = &state.lanes[number];
            (lane.clone(), progress.submitted)
        };
        // Parts that may be copied before the last one is here.
        let early = lane.memory.lock().unwrap_or_else(PoisonError::into_inner).early_parts(&lane);
        let (mut left, mut here) = (self.timeout, 0);
        loop {
            let (slice, began) = (left.min(LOOK_UP_EVERY), Instant::now());
            if here < early {
                let share = Share { parts: here + 1, of: lane.parts.len() };
                if exchange.has_share_within(share, slice) && !exchange.is_due() {
                    lane.parts[here].flag.raise(submission);
                    here += 1;
                    continue;
                }
            }
            let slice = if here < early { Duration::ZERO } else { slice };
            if exchange.is_due_within(slice) || left.is_zero() {
                let (mut slabs, outcome) = match exchange.wait_within(Duration::ZERO) {
                    Ok(slabs) => (slabs, Ok(())),
                    Err(error @ ClientError::Timeout { .. }) => {
                        return self.go_on_without(number, timed(error, self.timeout));
                    }
                    Err(error) => (exchange.give_up(), Err(error)),
                };
                if outcome.is_ok() {
                    self.fit(number, &mut slabs);
                }
                return self.finish(number, slabs, outcome);
            }
            if self.lock().is_closing {
                return;
            }
            // Time in which this process stood still is not one in which nothing came.
            let passed = began.elapsed();
            left = left.saturating_sub(passed - standstill::lost_time(slice.max(LOOK_UP_EVERY), passed));
        }
    }

    fn finish(&self, number: usize, slabs: Vec<node::Slab>, outcome: Result<(), ClientError>) {
        let lane = self.lane(number);
        for slab in slabs {
            lane.slab.get().put_back(slab);
        }
        if outcome.is_ok() {
            lane.memory.lock().unwrap_or_else(PoisonError::into_inner).values.read_ahead();
        }
        let mut state = self.lock();
        state.under_way.pop_front();
        if let Err(error) = outcome {
            state.lanes[number].0.kind().raise(Halves::NONE);
            state.failures.push(Failure { lane: number, is_refusal: false, why: error.into() });
        }
        state.end(number);
        self.changed.notify_all();
    }

    /// Makes what came what the device expects, which has been asked to widen it or not. Parameters that did not come as halves, because the
    /// answer codec was switched meanwhile, are rounded this once, as they would have been.
    fn fit(&self, number: usize, slabs: &mut [node::Slab]) {
        let lane = self.lane(number);
        let asks_halves = lane.memory.lock().unwrap_or_else(PoisonError::into_inner).asks_halves;
        let Some(slab) = slabs.first_mut() else { return };
        if asks_halves && slab.values_type() == DType::F32 {
            slab.convert_values(DType::Bf16);
        }
        lane.kind().raise(match slab.values_type() {
            DType::F16 => Halves::F16,
            DType::Bf16 => Halves::BF16,
            DType::F32 => Halves::NONE,
        });
    }

    /// After a time-out.
    fn go_on_without(&self, number: usize, error: ClientError) {
        let mut state = self.lock();
        let (lane, progress) = &mut state.lanes[number];
        progress.is_late = true;
        lane.kind().raise(Halves::NONE);
        lane.raise(progress.submitted);
        if state.failures.is_empty() {
            state.failures.push(Failure { lane: number, is_refusal: false, why: error.into() });
        }
        self.changed.notify_all();
    }

    /// A bucket that could not be sent.
    fn fail(&self, lane: usize, why: Why) {
        let mut state = self.lock();
        state.lanes[lane].0.kind().raise(Halves::NONE);
        state.failures.push(Failure { lane, is_refusal: false, why });
        state.end(lane);
        self.changed.notify_all();
    }

    fn let_go(&self) {
        let mut state = self.lock();
        state.is_closing = true;
        for (lane, progress) in &state.lanes {
            lane.raise(progress.submitted);
        }
        self.changed.notify_all();
    }

    /// Gives memory back, when no thread uses it any more.
    fn release(&self) {
        let lanes = std::mem::take(&mut self.lock().lanes);
        // What the device refuses now is of no use: at the end of a process its driver may be gone.
        let _ = self.device.attach().and_then(|()| self.device.drain(self.outward));
        let _ = self.device.drain(self.inward);
        for (lane, _) in &lanes {
            let memory = lane.memory.lock().unwrap_or_else(PoisonError::into_inner);
            for region in [&memory.gradient, &memory.values].into_iter().chain(&memory.former) {
                match region.own {
                    Some(own) => self.device.free(own),
                    None => self.device.unpin(region.slab),
                }
            }
            self.device.free(lane.words);
            if let Some(halves) = lane.halves {
                self.device.free_halves(halves);
            }
        }
    }
}

impl State {
    fn has_left(&self) -> bool {
        self.errands.is_empty() && !self.is_sending
    }

    /// Whether nothing is under way but what was sent in an iteration that has not ended.
    fn is_settled(&self) -> bool {
        let is_settled = |progress: &Progress| progress.submitted != progress.turned || progress.is_over();
        self.has_left() && self.lanes.iter().all(|(_, progress)| is_settled(progress))
    }

    fn first_under_way(&self) -> Option<(usize, Arc<Underway>)> {
        let first = self.under_way.front().filter(|_| !self.is_closing)?;
        Some((first.lane, first.exchange.clone()))
    }

    fn end(&mut self, lane: usize) {
        let (lane, progress) = &mut self.lanes[lane];
        progress.done = progress.submitted;
        lane.raise(progress.submitted);
    }
}

impl Progress {
    fn is_over(&self) -> bool {
        self.done == self.submitted
    }
}

fn is_half(dtype: Option<DType>) -> bool {
    dtype.is_some_and(|dtype| dtype != DType::F32)
}

impl Memory {
    /// How many parts of a lane may be copied before the last one is here: none where the pump copies them once more, or where what comes
    /// again after a connection was lost is not the same.
    fn early_parts(&self, lane: &Lane) -> usize {
        let is_direct = self.values.own.is_none() && !self.is_encoded;
        if is_direct { lane.parts.len() - 1 } else { 0 }
    }
}

/// One of the flags in a lane's words.
fn flag_at(words: Host, number: usize) -> Flag {
    Flag::at(Host(words.0 + FLAGS_AT + number * FLAG_BYTES))
}

#[allow(unsafe_code, reason = "the device writes the count")]
impl Lane {
    /// What the parameters are that came last: a value of [`Halves`].
    fn kind(&self) -> Flag {
        Flag::at(Host(self.words.0 + KIND_AT))
    }

    /// Where parameters are widened from, if they are asked for as halves.
    fn halves_of(&self, memory: &Memory) -> Option<Remote> {
        self.halves.filter(|_| memory.asks_halves)
    }

    /// Lets the device go on with all of it.
    fn raise(&self, submission: u32) {
        self.parts.iter().for_each(|part| part.flag.raise(submission));
    }

    fn count(&self) -> usize {
        // SAFETY: the words have room for it, and the copy that wrote it is done.
        let count = unsafe { std::ptr::read_volatile((self.words.0 + COUNT_AT) as *const u64) };
        usize::try_from(count).unwrap_or(usize::MAX)
    }
}

#[allow(unsafe_code, reason = "copies between the slab's memory and the pump's")]
impl Region {
    fn start(&self) -> Host {
        self.own.unwrap_or(self.slab)
    }

    /// Copies what came from the device to where frames leave from.
    fn write_back(&self) {
        if let Some(own) = self.own {
            // SAFETY: both have these many bytes, and no exchange has the slab.
            unsafe { std::ptr::copy_nonoverlapping(own.0 as *const u8, self.slab.0 as *mut u8, self.bytes) };
        }
    }

    /// Copies what frames brought to where the device reads it.
    fn read_ahead(&self) {
        if let Some(own) = self.own {
            // SAFETY: as above, and the device waits for the flag before it reads.
            unsafe { std::ptr::copy_nonoverlapping(self.slab.0 as *const u8, own.0 as *mut u8, self.bytes) };
        }
    }
}

impl Failure {
    fn error(self) -> PyErr {
        match self.why {
            Why::Client(error) => client(error),
            Why::Device(why) => raise("ParamillError", why),
        }
    }
}

impl From<ClientError> for Why {
    fn from(error: ClientError) -> Why {
        Why::Client(error)
    }
}

impl From<String> for Why {
    fn from(why: String) -> Why {
        Why::Device(why)
    }
}

fn is_non_finite(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Worker(
            WorkerError::NonFinite { .. } | WorkerError::Refused { cause: Cause::NonFinite, .. }
        )
    )
}
