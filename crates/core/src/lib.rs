//! Every decision of Paramill, and nothing else.
//!
//! This crate knows no sockets, clocks, threads, files or entropy. Time, randomness and order are inputs, so the
//! real driver (`paramill-node`) and the simulator (`paramill-sim`) run the very same code.
//!
//! The five axes (consistency, placement, optimizer, codec, broadcast) are each one file with a small trait beside a folder
//! with one file per choice. The roles ([`coordinator`], [`server`], [`aggregator`], [`worker`]) are state machines behind one contract, [`role::Role`].

pub mod absence;
pub mod address;
pub mod aggregator;
pub mod bandwidth;
pub mod broadcast;
pub mod checkpoint;
pub mod codec;
pub mod consistency;
pub mod coordinator;
pub mod expression;
pub mod fault;
pub mod hands;
pub mod hold;
mod intake;
pub mod kernels;
pub mod landing;
pub mod lease;
pub mod limits;
pub mod link;
pub mod local;
pub mod optimizer;
pub mod placement;
pub mod policy;
pub mod prng;
pub mod region;
pub mod registry;
pub mod replica;
pub mod role;
pub mod send_queue;
pub mod server;
pub mod spec;
pub mod standstill;
pub mod status;
pub mod store;
mod stream;
pub mod table;
pub mod types;
pub mod waits;
pub mod wire;
pub mod worker;
