//! Made data as files in the formats that the workloads read.

use super::{images, ratings, sparse_examples};
use crate::data::{idx, libsvm, ratings as ratings_file};
use std::io;
use std::path::{Path, PathBuf};

/// Writes `train.svm` and `test.svm` with [`sparse_examples`] and returns their paths; `.gz` is added for gzip.
pub fn write_sparse_examples(
    folder: &Path,
    seed: u64,
    examples: usize,
    gzip: bool,
) -> io::Result<[PathBuf; 2]> {
    let made = sparse_examples(seed, examples);
    let paths = ["train.svm", "test.svm"].map(|name| folder.join(file_name(name, gzip)));
    libsvm::write(&paths[0], &made.train)?;
    libsvm::write(&paths[1], &made.test)?;
    Ok(paths)
}

/// Writes `ratings.csv` with `count` made [`ratings`] and returns its path; `.gz` is added for gzip.
pub fn write_ratings(folder: &Path, seed: u64, count: usize, gzip: bool) -> io::Result<PathBuf> {
    let path = folder.join(file_name("ratings.csv", gzip));
    ratings_file::write(&path, &ratings(seed, count).train)?;
    Ok(path)
}

/// Writes the four idx files with made [`images`], `count` of them to train on, into `folder`.
pub fn write_images(folder: &Path, seed: u64, count: usize, gzip: bool) -> io::Result<()> {
    let made = images(seed, count);
    idx::write(folder, idx::Half::Train, &made.train, gzip)?;
    idx::write(folder, idx::Half::Test, &made.test, gzip)
}

fn file_name(name: &str, gzip: bool) -> String {
    format!("{name}{}", if gzip { ".gz" } else { "" })
}
