//! Files that are named on the command line: config files and scenarios.

use paramill_sim::input::{read_file, read_limited};
use std::io;
use std::path::Path;

/// The text of a file, or of stdin for `-`.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    if path.as_os_str() == "-" { read_limited(io::stdin().lock()) } else { read_file(path) }
}
