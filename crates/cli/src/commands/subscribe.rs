//! `paramill subscribe`: keeps the newest version of a job's parameters in a file.

use crate::args::SubscribeArgs;
use crate::failure::{Failure, OrUsage};
use crate::interrupt;
use crate::output::{Output, bytes};
use anyhow::{Context, anyhow};
use paramill_node::client::{ClientError, Clock, DType, JobOptions, Reader, Tensor, WorkerError};
use paramill_node::url::JobUrl;
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a signal may go unnoticed.
const LOOK_UP_EVERY: Duration = Duration::from_millis(100);

/// What is printed of a version that was written.
#[derive(Debug, Serialize)]
struct Written<'a> {
    version: Clock,
    file: &'a Path,
    /// Of the file.
    bytes: u64,
    /// Payload bytes that came so far, of all versions.
    bytes_received: u64,
}

pub(crate) fn run(args: &SubscribeArgs, output: &Output) -> Result<(), Failure> {
    let url: JobUrl = args.url.parse().or_usage()?;
    if args.out.file_name().is_none() {
        return Err(Failure::Usage(anyhow!("--out {}: expected the name of a file", args.out.display())));
    }
    interrupt::end_in_good_order();
    let reader = Reader::begin(JobOptions::at(url.clone()).timeout(args.timeout.0))?;
    let began = Instant::now();
    while !reader.is_open_within(LOOK_UP_EVERY)? {
        if interrupt::is_asked_to_end() {
            return Ok(());
        }
        if began.elapsed() > args.timeout.0 {
            return Err(reader.not_open(args.timeout.0).into());
        }
    }
    let mut wanted = 0;
    loop {
        let deadline = (wanted == 0).then(|| began + args.timeout.0);
        if !comes(&reader, wanted, deadline)? {
            break;
        }
        let snapshot = match reader.read(Snapshot::copy) {
            // A version that was damaged is fetched anew.
            Err(ClientError::Worker(WorkerError::NoVersion)) => continue,
            read => read?,
        };
        let (version, header) = (snapshot.version, snapshot.header(&url)?);
        let bytes_of_file = (header.len() + snapshot.values.len()) as u64;
        replace(&args.out, [&header, &snapshot.values])
            .with_context(|| format!("version {version} cannot be written to {}", args.out.display()))?;
        drop(snapshot);
        wanted = version + 1;
        let (file, bytes_received) = (&*args.out, reader.report().bytes_pulled);
        let words = if output.json() {
            // One line for each version.
            serde_json::to_string(&Written { version, file, bytes: bytes_of_file, bytes_received })?
        } else {
            let (written, received) = (bytes(bytes_of_file), bytes(bytes_received));
            format!("version {version}: {written} to {} ({received} received)", file.display())
        };
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{words}")?;
        stdout.flush()?;
        drop(stdout);
        let rests = Instant::now();
        while !args.once && rests.elapsed() < args.every.0 && !interrupt::is_asked_to_end() {
            std::thread::sleep(LOOK_UP_EVERY.min(args.every.0));
        }
        if args.once || interrupt::is_asked_to_end() {
            break;
        }
    }
    // Nobody waits for a reader: whether its last word arrives does not matter.
    let _ = reader.close();
    Ok(())
}

/// Waits for a version or a later one. False when there will be none, or the command is asked to end.
fn comes(reader: &Reader, wanted: Clock, deadline: Option<Instant>) -> Result<bool, Failure> {
    let is_here = || reader.version().is_some_and(|version| version >= wanted);
    if is_here() {
        return Ok(true);
    }
    let handle = match reader.await_version(wanted) {
        Err(ClientError::Worker(WorkerError::Over)) => return Ok(false),
        handle => handle?,
    };
    while !handle.is_due_within(LOOK_UP_EVERY) {
        if interrupt::is_asked_to_end() {
            return Ok(false);
        }
        if deadline.is_some_and(|deadline| deadline < Instant::now()) {
            return Err(
                anyhow!("there is no version yet; see `paramill status` for what the job waits for").into()
            );
        }
    }
    match handle.wait_within(Duration::ZERO) {
        Ok(()) => Ok(true),
        // What came last is written.
        Err(ClientError::Worker(WorkerError::Over)) => Ok(is_here()),
        Err(error) => Err(error.into()),
    }
}

/// A version as a file of safetensors has it: the length of a JSON header, the header, the values.
struct Snapshot {
    version: Clock,
    /// The places of the tensors' values, by name.
    tensors: serde_json::Map<String, serde_json::Value>,
    values: Vec<u8>,
}

impl Snapshot {
    fn copy(version: Clock, tensors: &[Tensor<'_>]) -> Snapshot {
        let bytes = tensors.iter().map(|tensor| tensor.values.len() * tensor.dtype.bytes()).sum();
        let mut snapshot =
            Snapshot { version, tensors: serde_json::Map::new(), values: Vec::with_capacity(bytes) };
        for tensor in tensors {
            let start = snapshot.values.len();
            tensor.write(&mut snapshot.values);
            let dtype = match tensor.dtype {
                DType::F32 => "F32",
                DType::F16 => "F16",
                DType::Bf16 => "BF16",
            };
            let offsets = [start, snapshot.values.len()];
            let entry = serde_json::json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": offsets });
            snapshot.tensors.insert(tensor.name.to_owned(), entry);
        }
        snapshot
    }

    /// Everything before the values.
    fn header(&self, url: &JobUrl) -> serde_json::Result<Vec<u8>> {
        let metadata = serde_json::json!({
            "version": self.version.to_string(),
            "job": url.to_string(),
            "digest": format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&self.values)),
        });
        let mut entries = self.tensors.clone();
        entries.insert("__metadata__".into(), metadata);
        let mut json = serde_json::to_vec(&entries)?;
        // Values begin at a multiple of 8 bytes; spaces fill up.
        json.resize(json.len().next_multiple_of(8), b' ');
        Ok([&(json.len() as u64).to_le_bytes(), &json[..]].concat())
    }
}

/// Writes beside the file, and then puts what was written in its place.
fn replace(out: &Path, parts: [&[u8]; 2]) -> io::Result<()> {
    let partial = beside(out);
    let written = File::create(&partial).and_then(|mut file| {
        parts.into_iter().try_for_each(|part| file.write_all(part))?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&partial, out)) {
        let _ = fs::remove_file(&partial);
        return Err(error);
    }
    // The name is on the disk when its folder is.
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

/// A name in the same folder: only there a file takes another's place at once. One that was left behind is used again.
fn beside(out: &Path) -> PathBuf {
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    out.with_file_name(format!(".{name}.partial"))
}
