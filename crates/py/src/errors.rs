//! Errors as Python exceptions: the classes are in `paramill.errors`, the words are those of the command line.

use paramill_core::wire::Cause;
use paramill_node::admin::AdminError;
use paramill_node::checkpoint::CopyError;
use paramill_node::client::{ClientError, WorkerError};
use pyo3::prelude::*;

/// The class of `paramill.errors` with this name.
pub(crate) fn raise(class: &'static str, message: impl ToString) -> PyErr {
    let message = message.to_string();
    Python::attach(|py| {
        let class = py.import("paramill.errors").and_then(|errors| errors.getattr(class));
        match class.and_then(|class| class.call1((message,))) {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    })
}

/// What went wrong in the client.
pub(crate) fn client(error: ClientError) -> PyErr {
    let class = match &error {
        ClientError::Timeout { .. } => "DeadlineError",
        ClientError::Ended(_) => "ClosedError",
        ClientError::Worker(error) => worker(error),
        _ => "ParamillError",
    };
    raise(class, error)
}

/// What went wrong between a command and the coordinator.
pub(crate) fn admin(error: AdminError) -> PyErr {
    let class = match &error {
        AdminError::Unreachable { .. } => "UnreachableError",
        AdminError::Failed(_) => "PolicyError",
        _ => "ParamillError",
    };
    raise(class, error)
}

pub(crate) fn copying(error: CopyError) -> PyErr {
    match error {
        CopyError::Admin(error) => admin(error),
        other => raise("ParamillError", other),
    }
}

fn worker(error: &WorkerError) -> &'static str {
    match error {
        WorkerError::Table(_) => "TableError",
        WorkerError::Shape { .. } => "ShapeError",
        WorkerError::NonFinite { .. } => "NonFiniteError",
        WorkerError::Order(_) => "OrderError",
        WorkerError::Damaged(_) => "DamagedError",
        WorkerError::Unreachable(_) => "UnreachableError",
        WorkerError::NotAMember(_) => "NotAMemberError",
        WorkerError::NoVersion => "OrderError",
        WorkerError::Over => "JobOverError",
        WorkerError::Refused { cause, .. } => match cause {
            Cause::Shape => "ShapeError",
            Cause::NonFinite => "NonFiniteError",
            Cause::NotAMember => "NotAMemberError",
            Cause::Declaration => "TableError",
            Cause::Policy => "PolicyError",
            Cause::TooFarAhead => "OrderError",
            _ => "ParamillError",
        },
        _ => "ParamillError",
    }
}
