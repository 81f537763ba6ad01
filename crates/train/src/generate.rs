//! Seeded data whose answer is known, for runs without files and for tests, and its writers.

mod files;
mod pictures;
mod rated;
mod sparse;

pub use files::{write_images, write_ratings, write_sparse_examples};
pub use pictures::{MadeImages, images};
pub use rated::{MadeRatings, ratings};
pub use sparse::{MadeExamples, sparse_examples};
