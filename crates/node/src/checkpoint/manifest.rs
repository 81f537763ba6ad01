//! A manifest as a file: JSON that people can read, with a digest of itself in its last line.

use super::file::digest;
use paramill_core::checkpoint::{Digest, FORMAT, Manifest, is_name};
use serde::Deserialize;
use std::io;

/// What stands before the digest.
const KEY: &str = "\"xxh3_128\": \"";

/// The text of a manifest.
pub(super) fn encode(manifest: &Manifest) -> io::Result<String> {
    let mut text = serde_json::to_string_pretty(manifest)?;
    // The digest is the last field of the object.
    text.truncate(text.trim_end_matches(['}', '\n']).len());
    text.push_str(&format!(",\n  {KEY}{}\"\n}}\n", Digest(0)));
    let sum = digest(text.as_bytes());
    Ok(text.replace(&format!("{KEY}{}", Digest(0)), &format!("{KEY}{sum}")))
}

/// Reads a manifest. The error ends a sentence that begins with what it is of.
pub(super) fn decode(bytes: &[u8]) -> Result<Manifest, String> {
    let damaged = || "is damaged".to_owned();
    let text = std::str::from_utf8(bytes).map_err(|_| damaged())?;
    check_format(text)?;
    let at = text.rfind(KEY).ok_or_else(damaged)? + KEY.len();
    let written = text.get(at..at + 32).ok_or_else(damaged)?;
    let blank = format!("{}{}{}", &text[..at], Digest(0), &text[at + 32..]);
    if digest(blank.as_bytes()).to_string() != written {
        return Err(damaged());
    }
    parse(text)
}

/// Reads what a manifest says. Its names lead nowhere.
pub(super) fn parse(text: &str) -> Result<Manifest, String> {
    check_format(text)?;
    let manifest: Manifest =
        serde_json::from_str(text).map_err(|error| format!("cannot be read: {error}"))?;
    let workers = manifest.worker_files.iter().map(|saved| &saved.file);
    let names = manifest.files.iter().chain(workers).map(|file| &file.name).chain([&manifest.folder]);
    if !names.into_iter().all(|name| is_name(name)) {
        return Err("names files that are elsewhere".into());
    }
    Ok(manifest)
}

fn check_format(text: &str) -> Result<(), String> {
    /// All that a release needs to know of a newer format.
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    if let Ok(Format { format }) = serde_json::from_str(text)
        && format > FORMAT
    {
        return Err(format!("is of format {format}, and this release reads formats up to {FORMAT}"));
    }
    Ok(())
}
