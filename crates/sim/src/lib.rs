//! Simulator.

pub mod models;
pub mod reproduce;
