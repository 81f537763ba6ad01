//! Seeded data whose answer is known, for runs without files and for tests.

mod pictures;
mod rated;
mod sparse;

pub use pictures::{MadeImages, images};
pub use rated::{MadeRatings, ratings};
pub use sparse::{MadeExamples, sparse_examples};
