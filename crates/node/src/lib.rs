//! The real driver of Paramill: the roles of `paramill-core` over sockets and threads.
//!
//! One event loop (`event_loop.rs`) drives every role: the coordinator, each data core of a server, and the worker
//! inside an application. A data core shares nothing with its siblings. [`server::start`] runs servers, [`aggregator::start`] an aggregator;
//! [`client::Job`] is the worker's library; [`admin`] asks and sets things from outside.

pub mod admin;
pub mod aggregator;
pub mod client;
mod clock;
pub mod data_cores;
pub mod env_vars;
mod event_loop;
pub mod exhaustion;
pub mod host;
pub mod identity;
pub mod pinning;
pub mod ports;
pub mod server;
pub mod stderr;
mod transport;
pub mod url;

pub use transport::Transport;
pub use transport::memory::Hub;
