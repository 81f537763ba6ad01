//! The native part of the Python package: conversions between Python's objects and `paramill-node`, and nothing else.
//!
//! Waits let go of the interpreter, and look after signals every now and then, so that Ctrl-C ends them. What users see
//! is written in Python (`python/paramill`); this module is private to it.

mod arrays;
mod condition;
mod device;
mod errors;
mod handle;
mod job;
mod local;
mod policy;
mod pump;
mod reader;
mod server;
mod slab;
mod table;
mod waiting;

use pyo3::prelude::*;

/// The module as Python imports it.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::condition::{Pull, WorkerProgress};
    #[pymodule_export]
    use super::handle::Handle;
    #[pymodule_export]
    use super::job::{Job, environment_url, identity};
    #[pymodule_export]
    use super::local::{LocalSteps, outer_optimizer};
    #[pymodule_export]
    use super::policy::{check_policies, codec_keeps_residual, codec_stages, models_of_rounds};
    #[pymodule_export]
    use super::policy::{optimizer_parameters, pulls_partially, steps_in_rounds};
    #[pymodule_export]
    use super::pump::Pump;
    #[pymodule_export]
    use super::reader::Reader;
    #[pymodule_export]
    use super::server::Server;
    #[pymodule_export]
    use super::slab::{Exchange, Slab};
    #[pymodule_export]
    use super::table::Table;
}
