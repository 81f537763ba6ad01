//! The real driver of Paramill: the roles of `paramill-core` over sockets and threads.
//!
//! One event loop (`event_loop.rs`) drives every role: the coordinator, each data core of a server, and the worker
//! inside an application. A data core shares nothing with its siblings. [`server::start`] runs servers, [`aggregator::start`] an aggregator;
//! [`client::Job`] is the worker's library; [`admin`] asks and sets things from outside.
//!
//! Types of `paramill-core` that public signatures have are re-exported, here and from [`client`]: a program needs no other
//! crate.

pub mod admin;
pub mod aggregator;
pub mod checkpoint;
pub mod client;
mod clock;
pub mod data_cores;
pub mod env_vars;
mod event_loop;
pub mod exhaustion;
pub mod host;
pub mod identity;
mod log;
pub mod pinning;
pub mod ports;
pub mod rate;
pub mod server;
pub mod state_store;
pub mod stderr;
mod topology;
mod transport;
pub mod url;
mod waker;

pub use clock::process_time;
pub use event_loop::Injection;
pub use log::{Level, Log};
pub use paramill_core::address::Addresses;
pub use paramill_core::coordinator::JobConfig;
pub use paramill_core::fault::FaultPlan;
pub use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
pub use paramill_core::registry::Registry;
pub use paramill_core::spec::SpecError;
pub use paramill_core::status::{JobSize, Status};
pub use paramill_core::types::{AggregatorId, ServerId};
pub use paramill_core::wire::{Fault, Refusal, WireError};
pub use transport::Transport;
pub use transport::memory::Hub;
pub use transport::tcp::options::UNSENT_BEYOND_THE_HOST;
