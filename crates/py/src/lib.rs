//! The native part of the Python package: conversions between Python's objects and `paramill-node`, and nothing else.
//!
//! Waits let go of the interpreter, and look after signals every now and then, so that Ctrl-C ends them. What users see
//! is written in Python (`python/paramill`); this module is private to it.

mod arrays;
mod condition;
mod device;
mod errors;
mod job;
mod policy;
mod pump;
mod server;
mod slab;
mod waiting;

use pyo3::prelude::*;

/// The module as Python imports it.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::condition::register_condition;
    #[pymodule_export]
    use super::job::{Handle, Job, environment_url, identity};
    #[pymodule_export]
    use super::policy::{check_policies, optimizer_parameters, pulls_partially};
    #[pymodule_export]
    use super::pump::Pump;
    #[pymodule_export]
    use super::server::Server;
    #[pymodule_export]
    use super::slab::{Exchange, Slab};
}
