//! How frames get from one node to another: TCP between hosts, shared memory between processes of one host, queues
//! within one process.

pub(crate) mod memory;
pub(crate) mod shm;
pub(crate) mod tcp;
