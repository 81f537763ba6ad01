//! The rules there are.

mod injected;
mod partition;

pub use injected::Injected;
pub use partition::Partition;
