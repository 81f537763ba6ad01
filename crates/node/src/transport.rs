//! How frames get from one node to another: TCP between processes, queues within one.

pub(crate) mod memory;
pub(crate) mod options;
pub(crate) mod tcp;
