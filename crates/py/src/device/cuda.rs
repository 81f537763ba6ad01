//! NVIDIA's driver, loaded when it is asked for: nothing of CUDA is needed to build or to install the package.

#![allow(unsafe_code, reason = "the driver's interface is C's")]

use super::{Device, Event, Flag, Halves, Host, Outcome, Remote, Stream, TopK};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

/// Kernels as text that the driver compiles for its GPU; `bench/gpu/compile.py` makes it of the files that end in `.cu`.
macro_rules! kernels {
    ($file:literal) => {
        match CStr::from_bytes_with_nul(concat!(include_str!($file), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("the text ends where it ends"),
        }
    };
}
const TOPK: &CStr = kernels!("topk.ptx");
const HALVES: &CStr = kernels!("halves.ptx");
const THREADS: c_uint = 256;
/// Elements that a thread widens, where that makes more than a few blocks.
const WIDENED_EACH: usize = 16;

const LIBRARY: &CStr = c"libcuda.so.1";

const NON_BLOCKING: c_uint = 1;
/// Whoever waits for the event sleeps, and it takes no time.
const BLOCKING_SYNC_WITHOUT_TIMING: c_uint = 1 | 2;
const PORTABLE: c_uint = 1;
const WAIT_UNTIL_AT_LEAST: c_uint = 0;

type Status = c_int;
type Handle = *mut c_void;

/// Declares the functions that are used, and looks all of them up.
macro_rules! driver {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        struct Driver {
            $($name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Driver {
            fn load() -> Outcome<Driver> {
                // SAFETY: the name is a string of C.
                let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if library.is_null() {
                    return Err("there is no driver of NVIDIA (libcuda.so.1) here".to_owned());
                }
                // SAFETY: the types are those of cuda.h for these versions of the functions.
                Ok(Driver {
                    $($name: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> Status>(
                            look_up(library, $symbol)?,
                        )
                    },)*
                })
            }
        }
    };
}

driver! {
    init: "cuInit" (c_uint);
    error_string: "cuGetErrorString" (Status, *mut *const c_char);
    device_get: "cuDeviceGet" (*mut c_int, c_int);
    context_retain: "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_set: "cuCtxSetCurrent" (Handle);
    context_get: "cuCtxGetCurrent" (*mut Handle);
    stream_create: "cuStreamCreate" (*mut Handle, c_uint);
    stream_wait_event: "cuStreamWaitEvent" (Handle, Handle, c_uint);
    stream_wait_value: "cuStreamWaitValue32_v2" (Handle, u64, u32, c_uint);
    stream_synchronize: "cuStreamSynchronize" (Handle);
    event_create: "cuEventCreate" (*mut Handle, c_uint);
    event_record: "cuEventRecord" (Handle, Handle);
    event_synchronize: "cuEventSynchronize" (Handle);
    copy_out: "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
    copy_in: "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    alloc: "cuMemAlloc_v2" (*mut u64, usize);
    free: "cuMemFree_v2" (u64);
    host_alloc: "cuMemHostAlloc" (*mut Handle, usize, c_uint);
    host_free: "cuMemFreeHost" (Handle);
    host_register: "cuMemHostRegister_v2" (Handle, usize, c_uint);
    host_unregister: "cuMemHostUnregister" (Handle);
    module_load: "cuModuleLoadData" (*mut Handle, *const c_void);
    function_get: "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    launch: "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
}

fn look_up(library: *mut c_void, symbol: &str) -> Outcome<*mut c_void> {
    let name = CString::new(symbol).map_err(|error| error.to_string())?;
    // SAFETY: the library is open, and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        Err(format!("the driver of NVIDIA has no {symbol}: it is too old"))
    } else {
        Ok(found)
    }
}

/// A GPU of NVIDIA's, in the context that PyTorch uses too.
pub(crate) struct Cuda {
    driver: Driver,
    context: Handle,
    /// Loaded before anything is asked of a stream: the driver may wait for all streams then, and they for others.
    kernels: Outcome<Kernels>,
}

/// The functions of `topk.cu`, and that of `halves.cu`.
#[derive(Clone, Copy)]
struct Kernels {
    reset: Handle,
    count_digits: Handle,
    pick_digit: Handle,
    count_entries: Handle,
    place_tiles: Handle,
    pack: Handle,
    widen: Handle,
}

// SAFETY: contexts and functions may be used by several threads, and the driver's functions lock what they need.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The device with this number.
    pub(crate) fn new(number: c_int) -> Outcome<Cuda> {
        let driver = Driver::load()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the arguments are places for one value each.
        unsafe {
            told(&driver, "cuInit", (driver.init)(0))?;
            told(&driver, "cuDeviceGet", (driver.device_get)(&mut device, number))?;
            told(&driver, "cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, device))?;
        }
        let mut cuda = Cuda { driver, context, kernels: Err("kernels are not loaded".to_owned()) };
        cuda.attach()?;
        // A GPU that cannot run them copies all the same.
        cuda.kernels = cuda.load_kernels();
        Ok(cuda)
    }

    fn check(&self, what: &str, status: Status) -> Outcome<()> {
        told(&self.driver, what, status)
    }

    fn handle(stream: Stream) -> Handle {
        stream.0 as Handle
    }

    fn load(&self, text: &CStr) -> Outcome<Handle> {
        let mut module = ptr::null_mut();
        // SAFETY: the text ends with a zero.
        let status = unsafe { (self.driver.module_load)(&mut module, text.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        Ok(module)
    }

    fn function(&self, module: Handle, name: &CStr) -> Outcome<Handle> {
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and is never unloaded.
        let status = unsafe { (self.driver.function_get)(&mut function, module, name.as_ptr()) };
        self.check("cuModuleGetFunction", status)?;
        Ok(function)
    }

    fn load_kernels(&self) -> Outcome<Kernels> {
        let (topk, halves) = (self.load(TOPK)?, self.load(HALVES)?);
        let function = |name: &CStr| self.function(topk, name);
        Ok(Kernels {
            reset: function(c"topk_reset")?,
            count_digits: function(c"topk_count_digits")?,
            pick_digit: function(c"topk_pick_digit")?,
            count_entries: function(c"topk_count_entries")?,
            place_tiles: function(c"topk_place_tiles")?,
            pack: function(c"topk_pack")?,
            widen: self.function(halves, c"halves_widen")?,
        })
    }

    /// Runs so many blocks of a kernel. Arguments are words of 8 bytes, of which a kernel reads as many as it declares.
    fn launch(&self, kernel: Handle, blocks: u32, stream: Stream, arguments: &[u64]) -> Outcome<()> {
        let mut places = [ptr::null_mut(); 12];
        for (place, argument) in places.iter_mut().zip(arguments) {
            *place = ptr::from_ref(argument).cast_mut().cast::<c_void>();
        }
        let stream = Self::handle(stream);
        // SAFETY: there are as many arguments as the kernel has parameters; the machine is little-endian, so a parameter of
        // 4 bytes is at the beginning of its word.
        let status = unsafe {
            (self.driver.launch)(
                kernel,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                places.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", status)
    }
}

fn told(driver: &Driver, what: &str, status: Status) -> Outcome<()> {
    if status == 0 {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver writes the address of a constant, or nothing.
    let words = unsafe {
        (driver.error_string)(status, &mut text);
        if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy() }
    };
    Err(format!("{what} of the GPU's driver: {words} ({status})"))
}

impl Device for Cuda {
    fn attach(&self) -> Outcome<()> {
        let mut current = ptr::null_mut();
        // SAFETY: the context was retained, and is never released: PyTorch keeps it as well.
        unsafe {
            self.check("cuCtxGetCurrent", (self.driver.context_get)(&mut current))?;
            if current == self.context {
                return Ok(());
            }
            self.check("cuCtxSetCurrent", (self.driver.context_set)(self.context))
        }
    }

    fn new_stream(&self) -> Outcome<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: a place for one handle.
        self.check("cuStreamCreate", unsafe { (self.driver.stream_create)(&mut stream, NON_BLOCKING) })?;
        Ok(Stream(stream as usize))
    }

    fn new_event(&self) -> Outcome<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: a place for one handle.
        let status = unsafe { (self.driver.event_create)(&mut event, BLOCKING_SYNC_WITHOUT_TIMING) };
        self.check("cuEventCreate", status)?;
        Ok(Event(event as usize))
    }

    fn allocate(&self, bytes: usize) -> Outcome<Host> {
        let mut memory = ptr::null_mut();
        // SAFETY: a place for one address; what the driver allocates has these many bytes.
        unsafe {
            self.check("cuMemHostAlloc", (self.driver.host_alloc)(&mut memory, bytes, PORTABLE))?;
            ptr::write_bytes(memory.cast::<u8>(), 0, bytes);
        }
        Ok(Host(memory as usize))
    }

    fn free(&self, memory: Host) {
        // SAFETY: it is of `allocate`. What the driver says at the end of the process is of no use.
        let _ = unsafe { (self.driver.host_free)(memory.0 as Handle) };
    }

    fn pin(&self, memory: Host, bytes: usize) -> bool {
        // SAFETY: the driver looks whether the pages are the process's.
        unsafe { (self.driver.host_register)(memory.0 as Handle, bytes, PORTABLE) == 0 }
    }

    fn unpin(&self, memory: Host) {
        // SAFETY: the driver looks whether the memory was registered.
        let _ = unsafe { (self.driver.host_unregister)(memory.0 as Handle) };
    }

    fn record(&self, event: Event, stream: Stream) -> Outcome<()> {
        // SAFETY: events are of `new_event`; streams are of `new_stream`, or PyTorch's own.
        self.check("cuEventRecord", unsafe {
            (self.driver.event_record)(event.0 as Handle, Self::handle(stream))
        })
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Outcome<()> {
        // SAFETY: as above.
        let status = unsafe { (self.driver.stream_wait_event)(Self::handle(stream), event.0 as Handle, 0) };
        self.check("cuStreamWaitEvent", status)
    }

    fn wait_flag(&self, stream: Stream, flag: Flag, value: u32) -> Outcome<()> {
        // SAFETY: memory of `cuMemHostAlloc` has the same address on the device.
        let status = unsafe {
            (self.driver.stream_wait_value)(
                Self::handle(stream),
                flag.address() as u64,
                value,
                WAIT_UNTIL_AT_LEAST,
            )
        };
        self.check("cuStreamWaitValue32", status)
    }

    fn copy_out(&self, to: Host, from: Remote, bytes: usize, stream: Stream) -> Outcome<()> {
        // SAFETY: the pump keeps both sides until the copy is done.
        let status = unsafe {
            (self.driver.copy_out)(to.0 as *mut c_void, from.0 as u64, bytes, Self::handle(stream))
        };
        self.check("cuMemcpyDtoHAsync", status)
    }

    fn copy_in(&self, to: Remote, from: Host, bytes: usize, stream: Stream) -> Outcome<()> {
        // SAFETY: as above.
        let status = unsafe {
            (self.driver.copy_in)(to.0 as u64, from.0 as *const c_void, bytes, Self::handle(stream))
        };
        self.check("cuMemcpyHtoDAsync", status)
    }

    fn choose(&self, stream: Stream, choice: &TopK) -> Outcome<()> {
        let kernels = self.kernels.as_ref().map_err(String::clone)?;
        let (tiles, layers) = (choice.tile_count, choice.layer_count);
        let word = |index: usize| (choice.work.0 + 4 * index) as u64;
        let bins = word(0);
        let choices = word(layers as usize * TopK::BINS);
        let counts = word(layers as usize * (TopK::BINS + 2));
        let bad = word(TopK::work_words(tiles as usize, layers as usize) - 1);
        let [values, residual, tile_table, layer_table, places, packed] =
            [choice.values, choice.residual, choice.tiles, choice.layers, choice.places, choice.packed]
                .map(|memory| memory.0 as u64);
        let run = |kernel, blocks, arguments: &[u64]| self.launch(kernel, blocks, stream, arguments);
        run(kernels.reset, layers.div_ceil(THREADS), &[layer_table, choices, u64::from(layers), bad])?;
        // Digits from the highest one on: where it is, how many bits it has, and above which bit all is known.
        for (shift, bits, known) in [(20, 11, 31), (9, 11, 20), (0, 9, 9)] {
            let added = if known == 31 { residual } else { 0 };
            let mask = (1_u64 << bits) - 1;
            run(
                kernels.count_digits,
                tiles,
                &[values, added, tile_table, choices, bins, bad, shift, mask, known],
            )?;
            run(kernels.pick_digit, layers, &[bins, choices, bits])?;
        }
        run(kernels.count_entries, tiles, &[values, tile_table, choices, counts])?;
        run(kernels.place_tiles, layers, &[layer_table, choices, counts])?;
        let half = u64::from(choice.half);
        run(kernels.pack, tiles, &[values, residual, tile_table, choices, counts, bad, places, packed, half])
    }

    fn allocate_halves(&self, count: usize) -> Outcome<Remote> {
        self.kernels.as_ref().map_err(String::clone)?;
        let mut memory = 0;
        // SAFETY: a place for one address.
        self.check("cuMemAlloc", unsafe { (self.driver.alloc)(&mut memory, (2 * count).max(1)) })?;
        Ok(Remote(memory as usize))
    }

    fn free_halves(&self, memory: Remote) {
        // SAFETY: it is of `allocate_halves`. What the driver says at the end of the process is of no use.
        let _ = unsafe { (self.driver.free)(memory.0 as u64) };
    }

    fn widen(&self, stream: Stream, halves: &Halves) -> Outcome<()> {
        let kernel = self.kernels.as_ref().map_err(String::clone)?.widen;
        let blocks = halves.count.div_ceil(THREADS as usize * WIDENED_EACH).clamp(1, 1024) as u32;
        let words = [halves.halves.0, halves.values.0, halves.count, halves.kind.address()];
        self.launch(kernel, blocks, stream, &words.map(|word| word as u64))
    }

    fn synchronize(&self, event: Event) -> Outcome<()> {
        // SAFETY: the event is of `new_event`.
        self.check("cuEventSynchronize", unsafe { (self.driver.event_synchronize)(event.0 as Handle) })
    }

    fn drain(&self, stream: Stream) -> Outcome<()> {
        // SAFETY: the stream is of `new_stream`.
        self.check("cuStreamSynchronize", unsafe { (self.driver.stream_synchronize)(Self::handle(stream)) })
    }
}
