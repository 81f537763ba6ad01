//! Reading what a job broadcasts.

use super::error::ClientError;
use super::handle::Handle;
use super::job::Job;
use super::options::JobOptions;
use crate::clock;
use paramill_core::codec::{self, write_elements};
use paramill_core::status::WorkerReport;
use paramill_core::types::{Clock, TableId};
use paramill_core::wire::DType;
use paramill_core::worker::WorkerError;
use std::time::Duration;

/// A reader of a job: it has the newest version of all tables that is whole, over all servers, and takes no part in training.
/// Nobody waits for it, and it may come and go at any time.
///
/// Versions arrive in the background. [`Reader::read`] shows the newest one, which stays the same meanwhile.
///
/// ```no_run
/// # use paramill_node::client::{JobOptions, Reader};
/// let reader = Reader::open(JobOptions::at("paramill://host:7070/run42".parse()?))?;
/// let mut version = reader.wait(0)?;
/// loop {
///     reader.read(|_, tensors| tensors.iter().for_each(|it| println!("{} {:?}", it.name, it.shape)))?;
///     version = reader.wait(version + 1)?;
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Reader {
    job: Job,
}

/// A tensor of a version.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Dimensions.
    pub shape: &'a [u64],
    /// The type of elements that its values were rounded to before they were broadcast, and F32 if some of them are none of that type: the
    /// answer codec was switched, or they are beside a NaN.
    pub dtype: DType,
    /// Its values.
    pub values: &'a [f32],
}

impl Tensor<'_> {
    /// Appends its values as elements of its type, little-endian: none of them changes.
    pub fn write(&self, out: &mut Vec<u8>) {
        write_elements(self.dtype, self.values, out);
    }
}

impl Reader {
    /// Joins the job and waits until its tables are known. A job that broadcasts nothing refuses.
    pub fn open(options: JobOptions) -> Result<Reader, ClientError> {
        let reader = Reader::begin(options)?;
        reader.job.start()?;
        Ok(reader)
    }

    /// Begins to join; [`Reader::is_open_within`] says when it has.
    pub fn begin(options: JobOptions) -> Result<Reader, ClientError> {
        Ok(Reader { job: Job::init(options.read_only())? })
    }

    /// Waits a while: whether the job's tables are known.
    pub fn is_open_within(&self, timeout: Duration) -> Result<bool, ClientError> {
        let is_due = self.job.start_is_due_within(timeout)?;
        if is_due {
            self.job.start_within(Duration::ZERO)?;
        }
        Ok(is_due)
    }

    /// The error of one that is not open after so long: who does not answer, and why.
    pub fn not_open(&self, after: Duration) -> ClientError {
        match self.job.start_within(Duration::ZERO) {
            Err(ClientError::Timeout { what, .. }) => {
                ClientError::Timeout { seconds: after.as_secs_f64(), what }
            }
            Err(error) => error,
            Ok(()) => ClientError::Timeout { seconds: after.as_secs_f64(), what: "the job's tables".into() },
        }
    }

    /// The version that is here whole; `None` before the first, and while a damaged one is fetched anew.
    pub fn version(&self) -> Option<Clock> {
        self.job.shared.lock().worker.staged_version()
    }

    /// Waits for this version or a later one; which one it is.
    pub fn wait(&self, version: Clock) -> Result<Clock, ClientError> {
        self.wait_within(version, self.job.timeout())
    }

    /// [`Reader::wait`] with a time-out of its own.
    pub fn wait_within(&self, version: Clock, timeout: Duration) -> Result<Clock, ClientError> {
        self.await_version(version)?.wait_within(timeout)?;
        Ok(self.version().unwrap_or(version))
    }

    /// The handle is due when this version is here, or a later one.
    pub fn await_version(&self, version: Clock) -> Result<Handle, ClientError> {
        let ticket = self.job.shared.act(|worker| worker.await_version(clock::now(), version))?;
        Ok(Handle::new(self.job.shared.clone(), ticket))
    }

    /// Shows the newest version that is here whole; [`WorkerError::NoVersion`] before the first, and while a damaged one is fetched anew. While `read` runs no other one takes its place, so it is to be short: what comes
    /// meanwhile waits.
    pub fn read<T>(&self, read: impl FnOnce(Clock, &[Tensor<'_>]) -> T) -> Result<T, ClientError> {
        let state = self.job.shared.lock();
        let worker = &state.worker;
        let mut tensors = Vec::new();
        for (id, spec) in (0..).map(TableId).zip(worker.tables()) {
            let (values, dtype) = (worker.staged(id)?, worker.staged_type(id)?);
            tensors.extend(spec.layers().map(|layer| {
                let values = &values[layer.range];
                let dtype = if codec::fits(dtype, values) { dtype } else { DType::F32 };
                Tensor { name: layer.name, shape: layer.shape, dtype, values }
            }));
        }
        let version = worker.staged_version().ok_or(WorkerError::NoVersion)?;
        Ok(read(version, &tensors))
    }

    /// Bytes moved so far; its clock counts versions.
    pub fn report(&self) -> WorkerReport {
        self.job.report()
    }

    /// Bytes held for parameters and for versions that are not whole.
    pub fn memory_bytes(&self) -> usize {
        self.job.shared.lock().worker.memory_bytes()
    }

    /// Leaves the job.
    pub fn close(&self) -> Result<(), ClientError> {
        self.job.close()
    }
}
