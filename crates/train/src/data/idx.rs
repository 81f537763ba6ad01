//! idx files, the format of MNIST and its kin: a magic number, the sides as big-endian u32, then bytes.

use super::source::{Sink, Source, malformed};
use super::{DataError, Images, MAX_IMAGE_SIDE, MAX_UNPACKED_BYTES, Place};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Magic of unsigned bytes in three dimensions: images.
const IMAGES_MAGIC: u32 = 0x0000_0803;
/// Magic of unsigned bytes in one dimension: labels.
const LABELS_MAGIC: u32 = 0x0000_0801;

/// The first label's byte: behind the magic number and the count.
const LABELS_START: u64 = 8;

/// The two halves of a folder of idx files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`.
    Train,
    /// `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`.
    Test,
}

impl Half {
    fn file_names(self) -> [&'static str; 2] {
        match self {
            Half::Train => ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"],
            Half::Test => ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"],
        }
    }
}

/// Reads the images and labels of one half of a folder; each file plain, or gzip with `.gz` after its name.
pub fn read(folder: &Path, half: Half) -> Result<Images, DataError> {
    if !folder.is_dir() {
        std::fs::metadata(folder).map_err(|why| DataError::Io { path: folder.to_owned(), why })?;
        return Err(malformed(folder, Place::File, "a folder with idx files", "a file"));
    }
    let [images, labels] = half.file_names();
    let (images_path, labels_path) = (find(folder, images)?, find(folder, labels)?);
    let ([count, height, width], pixels) = read_bytes(&images_path, IMAGES_MAGIC)?;
    let ([labels_count], labels) = read_bytes(&labels_path, LABELS_MAGIC)?;
    if labels_count != count {
        let expected = format!("{count} labels, one for each image");
        return Err(malformed(&labels_path, Place::Byte(4), expected, labels_count));
    }
    Ok(Images { height: height as usize, width: width as usize, pixels, labels })
}

/// How many classes the images of two folders' halves have.
///
/// Those of the training half are numbered without a gap, from 0 or from 1: a label beyond a gap is damage, which would
/// otherwise make a model of many classes that nothing belongs to. The test half has no class that training does not know.
pub fn classes(
    (train_folder, train): (&Path, &Images),
    (test_folder, test): (&Path, &Images),
) -> Result<usize, DataError> {
    let mut known = [false; 256];
    train.labels.iter().for_each(|&label| known[usize::from(label)] = true);
    let missing = (1..256).find(|&label| !known[label]).unwrap_or(256);
    let refuse = |folder: &Path, half: Half, position: usize, expected: String, label: u8| {
        let path = find(folder, half.file_names()[1])?;
        Err(malformed(&path, Place::Byte(LABELS_START + position as u64), expected, label))
    };
    let beyond_gap = |label: &&u8| usize::from(**label) > missing;
    if let Some((position, &label)) = (0..).zip(&train.labels).find(|(_, label)| beyond_gap(label)) {
        let expected = format!("a label from 0 to {}, as no image has the label {missing}", missing - 1);
        return refuse(train_folder, Half::Train, position, expected, label);
    }
    let is_unknown = |label: &&u8| !known[usize::from(**label)];
    if let Some((position, &label)) = (0..).zip(&test.labels).find(|(_, label)| is_unknown(label)) {
        let first = if known[0] { 0 } else { 1 };
        let expected = format!("a label from {first} to {}, as in the training data", missing - 1);
        return refuse(test_folder, Half::Test, position, expected, label);
    }
    Ok(missing)
}

/// Writes one half of a folder that [`read`] reads back.
pub fn write(folder: &Path, half: Half, images: &Images, gzip: bool) -> io::Result<()> {
    let write_one = |name: &str, magic: u32, sides: &[usize], bytes: &[u8]| {
        let mut sink = Sink::create(&folder.join(if gzip { format!("{name}.gz") } else { name.to_owned() }))?;
        sink.write_all(&magic.to_be_bytes())?;
        for &side in sides {
            let side = u32::try_from(side).map_err(io::Error::other)?;
            sink.write_all(&side.to_be_bytes())?;
        }
        sink.write_all(bytes)?;
        sink.finish()
    };
    let [pixels_name, labels_name] = half.file_names();
    write_one(pixels_name, IMAGES_MAGIC, &[images.len(), images.height, images.width], &images.pixels)?;
    write_one(labels_name, LABELS_MAGIC, &[images.len()], &images.labels)
}

fn find(folder: &Path, name: &str) -> Result<PathBuf, DataError> {
    let candidates = [folder.join(name), folder.join(format!("{name}.gz"))];
    candidates.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        let expected = format!("a file `{name}` or `{name}.gz` in it");
        malformed(folder, Place::File, expected, "neither")
    })
}

/// The sides and the bytes of a file with `D` dimensions: a count, then the sides of an item.
fn read_bytes<const D: usize>(path: &Path, magic: u32) -> Result<([u32; D], Vec<u8>), DataError> {
    let mut source = Source::open(path)?;
    let found = read_u32(&mut source, 0)?;
    if found != magic {
        let expected = format!("the magic number {magic:#010x}");
        return Err(malformed(path, Place::Byte(0), expected, format!("{found:#010x}")));
    }
    let mut sides = [0; D];
    for (dimension, side) in sides.iter_mut().enumerate() {
        let at = 4 + 4 * dimension as u64;
        *side = read_u32(&mut source, at)?;
        let (what, limit) = match dimension {
            0 => ("a count from 1", u32::MAX),
            _ => ("a side from 1", MAX_IMAGE_SIDE),
        };
        if !(1..=limit).contains(side) {
            return Err(malformed(path, Place::Byte(at), format!("{what} to {limit}"), *side));
        }
    }
    let start = 4 + 4 * D as u64;
    let length: u64 = sides.iter().map(|&side| u64::from(side)).product();
    if length > MAX_UNPACKED_BYTES {
        let what = format!("{length} bytes announced by the sides {sides:?}");
        return Err(DataError::TooLarge {
            path: path.to_owned(),
            place: Place::Byte(4),
            what,
            limit: MAX_UNPACKED_BYTES,
        });
    }
    // One byte more is asked for, to see whether the file goes on.
    let bytes = source.read_at_most(length + 1, start)?;
    if bytes.len() as u64 != length {
        let found = if bytes.len() as u64 > length { "more".into() } else { format!("{}", bytes.len()) };
        let expected = format!("{length} bytes after the sides {sides:?}");
        return Err(malformed(path, Place::Byte(start + length.min(bytes.len() as u64)), expected, found));
    }
    Ok((sides, bytes))
}

fn read_u32(source: &mut Source, at: u64) -> Result<u32, DataError> {
    let mut bytes = [0; 4];
    source.read_exact(&mut bytes, at)?;
    Ok(u32::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_images() -> Images {
        Images { height: 2, width: 3, pixels: (0..12).collect(), labels: vec![7, 1] }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for gzip in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), Half::Test, &two_images(), gzip).unwrap();
            assert_eq!(read(folder.path(), Half::Test).unwrap(), two_images());
            let error = read(folder.path(), Half::Train).unwrap_err().to_string();
            assert!(error.contains("expected a file `train-images-idx3-ubyte` or"), "{error}");
        }
    }

    #[test]
    fn every_fault_is_named_with_its_byte() {
        let header = |magic: u32, sides: [u32; 3]| {
            let mut bytes = magic.to_be_bytes().to_vec();
            sides.iter().for_each(|side| bytes.extend(side.to_be_bytes()));
            bytes
        };
        let with_pixels = |count: usize| {
            let mut bytes = header(IMAGES_MAGIC, [2, 2, 3]);
            bytes.extend(vec![0; count]);
            bytes
        };
        for (bytes, expected) in [
            (vec![0, 0, 8], "byte 3: expected 1 more bytes, found the end of the file"),
            (
                header(LABELS_MAGIC, [2, 2, 3]),
                "byte 0: expected the magic number 0x00000803, found 0x00000801",
            ),
            (header(IMAGES_MAGIC, [0, 28, 28]), "byte 4: expected a count from 1"),
            (header(IMAGES_MAGIC, [1, 28, 0]), "byte 12: expected a side from 1 to 256, found 0"),
            (header(IMAGES_MAGIC, [1, 100_000, 28]), "byte 8: expected a side from 1 to 256, found 100000"),
            (header(IMAGES_MAGIC, [u32::MAX, 28, 28]), "exceeds the limit of 2147483648"),
            (header(IMAGES_MAGIC, [2_000_000, 28, 28]), "expected 1568000000 bytes after the sides"),
            (with_pixels(11), "byte 27: expected 12 bytes after the sides [2, 2, 3], found 11"),
            (with_pixels(13), "byte 28: expected 12 bytes after the sides [2, 2, 3], found more"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), Half::Train, &two_images(), false).unwrap();
            std::fs::write(folder.path().join("train-images-idx3-ubyte"), bytes).unwrap();
            let error = read(folder.path(), Half::Train).unwrap_err().to_string();
            assert!(
                error.contains("train-images-idx3-ubyte") && error.contains(expected),
                "{expected}: {error}"
            );
        }
    }

    #[test]
    fn labels_must_match_the_images() {
        let folder = tempfile::tempdir().unwrap();
        let one = Images { height: 2, width: 3, pixels: vec![0; 6], labels: vec![1] };
        write(folder.path(), Half::Train, &one, true).unwrap();
        let labels = folder.path().join("train-labels-idx1-ubyte.gz");
        let kept = std::fs::read(&labels).unwrap();
        write(folder.path(), Half::Train, &two_images(), true).unwrap();
        std::fs::write(&labels, kept).unwrap();
        let error = read(folder.path(), Half::Train).unwrap_err().to_string();
        assert!(error.contains("expected 2 labels, one for each image, found 1"), "{error}");
    }

    #[test]
    fn a_path_that_is_no_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(
            read(&file, Half::Train).unwrap_err().to_string().contains("expected a folder with idx files")
        );
        let missing = read(&folder.path().join("nowhere"), Half::Train).unwrap_err().to_string();
        assert!(missing.contains("cannot open") && missing.contains("nowhere"), "{missing}");
    }
}
