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
            return Err(anyhow!("the job has not started after {}", args.timeout).into());
        }
    }
    let mut wanted = 0;
    loop {
        let deadline = (wanted == 0).then(|| began + args.timeout.0);
        let Some(version) = next(&reader, wanted, deadline)? else { break };
        wanted = version + 1;
        let bytes_of_file = write(&reader, &url, &args.out)
            .with_context(|| format!("version {version} cannot be written to {}", args.out.display()))?;
        let (file, bytes_received) = (&*args.out, reader.report().bytes_pulled);
        if output.json() {
            output.object(&Written { version, file, bytes: bytes_of_file, bytes_received })?;
        } else {
            let (written, received) = (bytes(bytes_of_file), bytes(bytes_received));
            output
                .text(format!("version {version}: {written} to {} ({received} received)", file.display()))?;
        }
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

/// Waits for a version; `None` when there will be no more, or the command is asked to end.
fn next(reader: &Reader, wanted: Clock, deadline: Option<Instant>) -> Result<Option<Clock>, Failure> {
    if let Some(version) = reader.version().filter(|version| *version >= wanted) {
        return Ok(Some(version));
    }
    let handle = match reader.await_version(wanted) {
        Err(error) if is_over(&error) => return Ok(None),
        handle => handle?,
    };
    while !handle.is_due_within(LOOK_UP_EVERY) {
        if interrupt::is_asked_to_end() {
            return Ok(None);
        }
        if deadline.is_some_and(|deadline| deadline < Instant::now()) {
            return Err(
                anyhow!("there is no version yet; see `paramill status` for what the job waits for").into()
            );
        }
    }
    match handle.wait_within(Duration::ZERO) {
        Ok(()) => Ok(reader.version()),
        // What came last is written.
        Err(error) if is_over(&error) => Ok(reader.version().filter(|version| *version >= wanted)),
        Err(error) => Err(error.into()),
    }
}

/// Whether the job has ended in good order.
fn is_over(error: &ClientError) -> bool {
    matches!(error, ClientError::Worker(WorkerError::NotAMember(why)) if why == "the job is over")
}

/// Writes the newest version beside the file, and then puts it in its place. Bytes written.
fn write(reader: &Reader, url: &JobUrl, out: &Path) -> anyhow::Result<u64> {
    let partial = beside(out);
    let written = reader.read(|version, tensors| -> io::Result<u64> {
        let mut file = io::BufWriter::with_capacity(1 << 20, File::create(&partial)?);
        let written = safetensors(&mut file, version, url, tensors)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        Ok(written)
    })?;
    let written = written.and_then(|bytes| fs::rename(&partial, out).map(|()| bytes));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    // The name is on the disk when its folder is.
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all())?;
    Ok(written?)
}

/// A name in the same folder: only there a file takes another's place at once. One that was left behind is used again.
fn beside(out: &Path) -> PathBuf {
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    out.with_file_name(format!(".{name}.partial"))
}

/// Writes tensors in the format of safetensors: the length of a JSON header, the header, the values. Bytes written.
fn safetensors(
    file: &mut impl Write,
    version: Clock,
    url: &JobUrl,
    tensors: &[Tensor<'_>],
) -> io::Result<u64> {
    let mut header = serde_json::Map::new();
    let metadata = serde_json::json!({ "version": version.to_string(), "job": url.to_string() });
    header.insert("__metadata__".into(), metadata);
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.values.len() * tensor.dtype.bytes();
        let dtype = match tensor.dtype {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
        };
        let entry =
            serde_json::json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.to_owned(), entry);
    }
    let mut header = serde_json::to_vec(&header)?;
    // Values begin at a multiple of 8 bytes; spaces fill up.
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut bytes = Vec::new();
    for tensor in tensors {
        bytes.clear();
        tensor.write(&mut bytes);
        file.write_all(&bytes)?;
    }
    Ok((8 + header.len() + end) as u64)
}
