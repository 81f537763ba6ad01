//! The rules there are.

mod closed;
mod injected;
mod partition;

pub use closed::Closed;
pub use injected::Injected;
pub use partition::Partition;
