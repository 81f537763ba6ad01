//! A reader of a job.

use crate::errors::{client, raise};
use crate::waiting::{check_process, duration, timed, until_due};
use numpy::PyArray1;
use paramill_node::client::{self as node, DType, JobOptions};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// A tensor of a version: its name, shape, element type and bytes.
type Read<'py> = (String, Vec<u64>, &'static str, Bound<'py, PyArray1<u8>>);

/// Receives what a job broadcasts.
#[pyclass(frozen, module = "paramill._native")]
pub(crate) struct Reader {
    /// Gone when it was closed.
    reader: Mutex<Option<Arc<node::Reader>>>,
    process: u32,
}

#[pymethods]
impl Reader {
    /// Joins the job at `url`, and waits until its tables are known.
    #[new]
    #[pyo3(signature = (url, *, timeout, transport))]
    fn new(py: Python<'_>, url: &str, timeout: f64, transport: Option<&str>) -> PyResult<Reader> {
        let url = url.parse().map_err(|error| raise("UrlError", error))?;
        let options =
            JobOptions::at_with_environment(url).map_err(|error| raise("EnvironmentError", error))?;
        let timeout = duration(timeout)?;
        let mut options = options.timeout(timeout);
        if let Some(transport) = transport {
            options = options.transport(transport.parse().map_err(|why| raise("PolicyError", why))?);
        }
        let reader = node::Reader::begin(options).map_err(client)?;
        let mut is_open = false;
        until_due(py, timeout, |slice| {
            is_open = reader.is_open_within(slice).map_err(client)?;
            Ok(is_open)
        })?;
        if !is_open {
            return Err(client(reader.not_open(timeout)));
        }
        Ok(Reader { reader: Mutex::new(Some(Arc::new(reader))), process: std::process::id() })
    }

    #[getter]
    fn version(&self) -> PyResult<Option<u64>> {
        Ok(self.reader()?.version())
    }

    /// Payload bytes that came so far.
    #[getter]
    fn bytes_received(&self) -> PyResult<u64> {
        Ok(self.reader()?.report().bytes_pulled)
    }

    /// Bytes held for parameters and for versions that are not whole.
    #[getter]
    fn memory_bytes(&self) -> PyResult<usize> {
        Ok(self.reader()?.memory_bytes())
    }

    /// Waits for this version or a later one; which one is here.
    fn wait(&self, py: Python<'_>, version: u64, timeout: f64) -> PyResult<u64> {
        let (reader, timeout) = (self.reader()?, duration(timeout)?);
        let handle = reader.await_version(version).map_err(client)?;
        until_due(py, timeout, |slice| Ok(handle.is_due_within(slice)))?;
        handle.wait_within(std::time::Duration::ZERO).map_err(|error| client(timed(error, timeout)))?;
        Ok(reader.version().unwrap_or(version))
    }

    /// The newest version that is whole, and its tensors, copied.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<(u64, Vec<Read<'py>>)> {
        let reader = self.reader()?;
        let copy = |version: u64, tensors: &[node::Tensor<'_>]| {
            let copy = |tensor: &node::Tensor<'_>| {
                let mut bytes = Vec::with_capacity(tensor.values.len() * tensor.dtype.bytes());
                tensor.write(&mut bytes);
                (tensor.name.to_owned(), tensor.shape.to_vec(), name_of(tensor.dtype), bytes)
            };
            (version, tensors.iter().map(copy).collect::<Vec<_>>())
        };
        let (version, tensors) = py.detach(|| reader.read(copy)).map_err(client)?;
        let array = |(name, shape, dtype, bytes)| (name, shape, dtype, PyArray1::from_vec(py, bytes));
        Ok((version, tensors.into_iter().map(array).collect()))
    }

    /// Leaves the job.
    fn close(&self, py: Python<'_>) {
        let reader = self.lock().take();
        if std::process::id() != self.process {
            return std::mem::forget(reader);
        }
        // Nobody waits for a reader: whether its last word arrives does not matter.
        py.detach(|| drop(reader.map(|reader| reader.close())));
    }
}

impl Reader {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<node::Reader>>> {
        self.reader.lock().expect("no holder of this lock panics")
    }

    fn reader(&self) -> PyResult<Arc<node::Reader>> {
        check_process(self.process)?;
        self.lock().clone().ok_or_else(|| raise("ClosedError", "this subscriber was closed"))
    }
}

fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
    }
}
