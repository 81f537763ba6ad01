//! Seeded data whose answer is known, for runs without files and for tests.

mod sparse;

pub use sparse::{MadeExamples, sparse_examples};
