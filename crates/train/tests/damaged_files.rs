//! Files damaged in every way that chance finds are read or refused by name, never with a panic.

use paramill_core::prng::Prng;
use paramill_train::data::{idx, libsvm, ratings};
use paramill_train::{DataError, generate};
use std::path::Path;

#[test]
fn damaged_files_are_read_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut prng = Prng::new(3);
    for gzip in [false, true] {
        let [svm, _] = generate::write_sparse_examples(path, 1, 20, gzip).unwrap();
        try_damage(&mut prng, &svm, || libsvm::read(&svm).map(drop));
        let csv = generate::write_ratings(path, 1, 20, gzip).unwrap();
        try_damage(&mut prng, &csv, || ratings::read(&csv).map(drop));
    }
    for name in ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"] {
        for gzip in [false, true] {
            // A plain file is preferred to a compressed one of the same name.
            let images = tempfile::tempdir().unwrap();
            generate::write_images(images.path(), 1, 3, gzip).unwrap();
            let file = images.path().join(if gzip { format!("{name}.gz") } else { name.to_owned() });
            try_damage(&mut prng, &file, || idx::read(images.path(), idx::Half::Train).map(drop));
        }
    }
}

/// Reads a file with some bytes changed or its end cut off, many times; it is often enough not readable.
fn try_damage(prng: &mut Prng, file: &Path, read: impl Fn() -> Result<(), DataError>) {
    let whole = std::fs::read(file).expect("the file was just written");
    read().expect("the whole file is readable");
    let folder = file.parent().expect("the file lies in a folder").display().to_string();
    let mut refused = 0;
    for _ in 0..200 {
        let mut bytes = whole.clone();
        if prng.chance(0.3) {
            bytes.truncate(prng.below(bytes.len() as u64) as usize);
        }
        // Most of the damage is done to the beginning, where the headers are.
        let reach = if prng.chance(0.5) { 24 } else { bytes.len() as u64 };
        for _ in 0..=prng.below(4) {
            if let Some(byte) = bytes.get_mut(prng.below(reach) as usize) {
                *byte = prng.next_u64() as u8;
            }
        }
        std::fs::write(file, bytes).expect("the folder is writable");
        if let Err(error) = read() {
            refused += 1;
            assert!(error.to_string().contains(&folder), "{error}");
        }
    }
    assert!(refused > 20, "{}: only {refused} of 200 refused", file.display());
    std::fs::write(file, whole).expect("the folder is writable");
}
