//! The rules there are.

mod closed;
mod cut;
mod injected;
mod partition;

pub use closed::Closed;
pub use cut::Cut;
pub use injected::Injected;
pub use partition::Partition;
