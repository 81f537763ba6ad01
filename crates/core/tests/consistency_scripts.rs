//! Decisions as text: each file in `consistency/` is a script of commands, `----`, and what they must lead to.
//!
//! Blocks are separated by empty lines; lines that begin with `#` are for the reader. `start N MODEL` begins anew with
//! N workers. `push w0 3` is worker 0's gradient of iteration 3, `pull w0 4` asks after 4 iterations. With
//! `REGENERATE_GOLDEN=1` in the environment the expected parts are written anew: read the difference before you
//! commit it.

#[path = "consistency/world.rs"]
mod world;

use std::fs;
use std::path::{Path, PathBuf};
use world::World;

#[test]
fn scripts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/consistency");
    let mut scripts: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    scripts.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    scripts.sort();
    assert!(scripts.len() >= 5, "scripts are missing: {scripts:?}");
    for path in scripts {
        let expected = fs::read_to_string(&path).unwrap();
        let actual = replay(&expected);
        if regenerate() {
            write(&path, &actual);
            continue;
        }
        let differs = expected.lines().zip(actual.lines()).position(|(expected, actual)| expected != actual);
        if let Some(line) = differs {
            let line_of = |text: &str| text.lines().nth(line).unwrap_or("").to_owned();
            panic!(
                "{}:{}: expected\n{}\nbut it is\n{}\n\nall of it:\n{actual}",
                path.display(),
                line + 1,
                line_of(&expected),
                line_of(&actual)
            );
        }
        assert_eq!(expected, actual, "{}", path.display());
    }
}

/// The script with the expected parts as they come out now.
fn replay(script: &str) -> String {
    let mut world = World::new(1, "bsp");
    let blocks: Vec<String> = script.trim().split("\n\n").map(|block| run(&mut world, block)).collect();
    blocks.join("\n\n") + "\n"
}

fn run(world: &mut World, block: &str) -> String {
    let given: Vec<&str> = block.lines().take_while(|&line| line != "----").collect();
    let mut out = given.join("\n");
    let commands: Vec<&&str> = given.iter().filter(|line| !line.starts_with('#')).collect();
    if commands.is_empty() {
        return out;
    }
    out += "\n----";
    for command in commands {
        out += "\n";
        match command.strip_prefix("start ") {
            Some(rest) => {
                let (workers, policy) = rest.split_once(' ').expect("start N MODEL");
                *world = World::new(workers.parse().expect("a number of workers"), policy);
                out += &format!("{command}: {}", world.controller.policy());
            }
            None => out += &world.run(command),
        }
    }
    out
}

#[expect(clippy::disallowed_methods, reason = "a test may ask its environment")]
fn regenerate() -> bool {
    std::env::var("REGENERATE_GOLDEN").is_ok_and(|value| value == "1")
}

#[expect(clippy::disallowed_methods, reason = "rewriting expectations is asked for explicitly")]
fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("the script can be written");
}
