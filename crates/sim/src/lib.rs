//! The other driver: the very same roles in virtual time, with faults from a seed and checkers that watch.
//!
//! [`world::World`] moves frames between roles through a [`network::Network`] whose faults are [`rule::Rule`]s.
//! Nothing here reads a clock or draws entropy: a seed and a configuration give the same run, event for event.

pub mod actor;
pub mod archive;
pub mod broadcast;
pub mod canary;
pub mod checkers;
pub mod cluster;
pub mod compute;
pub mod gradient;
pub mod input;
pub mod judge;
pub mod models;
pub mod network;
pub mod operator;
pub mod player;
mod queue;
pub mod report;
pub mod reproduce;
pub mod rule;
pub mod rules;
pub mod scenario;
pub mod spectator;
mod stall;
pub mod swarm;
pub mod training;
pub mod world;
