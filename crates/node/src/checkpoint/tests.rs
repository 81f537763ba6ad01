use super::*;
use paramill_core::checkpoint::{CutRange, FORMAT, SavedTable, SkippedRun};
use paramill_core::policy::Policy;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, ShardId};

/// The elements of a table of `len` from `start` on, with numbers that tell where they were.
fn table(start: u64, len: u64) -> TableCut {
    let values = |base: f32| (start..start + len).map(|at| base + at as f32).collect::<Vec<f32>>();
    TableCut {
        name: "w".into(),
        shape: vec![10],
        version: 5,
        ranges: vec![CutRange { start, len, steps: 5 }],
        skipped: vec![SkippedRun { start: start + 1, len: 1, skipped: 2 }],
        parameters: values(0.0),
        slots: vec![values(100.0), values(200.0)],
    }
}

fn cut(folder: &str, server: u32, start: u64, len: u64) -> Box<ShardCut> {
    let shard = ShardId { server: ServerId(server), core: 0 };
    let tables = vec![table(start, len)];
    Box::new(ShardCut { folder: folder.into(), job: "job".into(), clock: 5, shard, tables })
}

fn manifest(folder: &str, clock: Clock, files: Vec<SavedFile>) -> Manifest {
    let table = TableSpec::dense("w", [10]);
    Manifest {
        format: FORMAT,
        job: "job".into(),
        folder: folder.into(),
        clock,
        workers: 2,
        seed: 1,
        policy: Policy::default(),
        overrides: vec![],
        tables: vec![SavedTable { table, optimizer: "adam".into(), sync: "bsp".into() }],
        files,
    }
}

/// A checkpoint of two servers.
fn save(archive: &Archive, folder: &str, clock: Clock, keep: &[&str]) -> Manifest {
    let keep: Vec<String> = keep.iter().map(|name| (*name).to_owned()).collect();
    let file = |server, start, len| {
        let request = Request::Write { cut: cut(folder, server, start, len), keep: keep.clone() };
        let Response::Written { file, .. } = archive.carry_out(request) else { panic!("another answer") };
        file.expect("it is written")
    };
    let manifest = manifest(folder, clock, vec![file(0, 0, 6), file(1, 6, 4)]);
    let request = Request::Complete { manifest: Box::new(manifest.clone()), keep };
    let done = Response::Completed { folder: folder.into(), outcome: Ok(()) };
    assert_eq!(archive.carry_out(request), done);
    manifest
}

fn archive() -> (tempfile::TempDir, Archive) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let archive = Archive::open(folder.path().join("checkpoints")).expect("it is made");
    (folder, archive)
}

fn restore(
    archive: &Archive,
    manifest: &Manifest,
    ranges: &[(u64, u64)],
) -> Result<Vec<Vec<TableCut>>, String> {
    let ranges = ranges.iter().map(|&(start, end)| start..end).collect();
    let wanted = vec![Wanted { name: "w".into(), slots: 2, ranges }];
    let request = Request::Restore { resumed: manifest.resumed(), wanted };
    let Response::Restored(restored) = archive.carry_out(request) else { panic!("another answer") };
    restored
}

use std::ops::Range;

#[test]
fn every_range_is_found_in_whichever_file_it_is() {
    let (_folder, archive) = archive();
    let manifest = save(&archive, "step-a", 5, &[]);
    let pieces = restore(&archive, &manifest, &[(1, 3), (4, 9)]).unwrap().remove(0);
    let ranges: Vec<Range<u64>> = pieces.iter().map(|piece| piece.ranges[0].elements()).collect();
    assert_eq!(ranges, [1..3, 4..6, 6..9]);
    for piece in &pieces {
        let start = piece.ranges[0].start as f32;
        assert_eq!(
            (piece.parameters[0], piece.slots[0][0], piece.slots[1][0]),
            (start, start + 100.0, start + 200.0)
        );
    }
    assert_eq!(pieces[0].skipped, [SkippedRun { start: 1, len: 1, skipped: 2 }]);
    assert_eq!(pieces[1].skipped, []);
    assert_eq!(pieces[2].skipped, [SkippedRun { start: 7, len: 1, skipped: 2 }]);
}

#[test]
fn the_newest_complete_one_is_found_and_others_go() {
    let (_folder, archive) = archive();
    assert!(archive.begin("job", true).unwrap().newest.is_none());
    save(&archive, "step-1", 5, &[]);
    save(&archive, "step-2", 10, &["step-1"]);
    // Somebody was killed before the manifest was there.
    archive.carry_out(Request::Write {
        cut: cut("step-3", 0, 0, 6),
        keep: vec!["step-1".into(), "step-2".into()],
    });
    let survey = archive.begin("job", true).unwrap();
    assert_eq!(survey.newest.map(|newest| newest.folder).as_deref(), Some("step-2"));
    assert_eq!(survey.kept, [(5, "step-1".to_owned()), (10, "step-2".to_owned())]);
    save(&archive, "step-4", 20, &["step-2"]);
    assert_eq!(archive.folders().unwrap(), ["step-2", "step-4"]);
    let why = archive.begin("job", false).unwrap_err().to_string();
    assert!(why.contains("has checkpoint step-4; give --resume"), "{why}");
    let why = archive.begin("other", true).unwrap_err().to_string();
    assert!(why.contains("has checkpoints of job `job`, and this is job `other`"), "{why}");
}

#[test]
fn a_server_that_writes_for_an_order_that_was_given_up_removes_nothing_newer() {
    let (_folder, archive) = archive();
    let name = |number| paramill_core::checkpoint::folder(number * 10, 1, number);
    let write = |number, server| {
        archive.carry_out(Request::Write { cut: cut(&name(number), server, 0, 6), keep: vec![] });
    };
    write(1, 0);
    write(2, 0);
    assert_eq!(archive.folders().unwrap(), [name(2)]);
    write(1, 1);
    assert_eq!(archive.folders().unwrap(), [name(1), name(2)]);
}

/// Tries `bytes` in place of a file; what the survey says then.
fn survey_with(archive: &Archive, path: &Path, bytes: &[u8]) -> Survey {
    let original = fs::read(path).unwrap();
    fs::write(path, bytes).unwrap();
    let survey = archive.survey("job");
    fs::write(path, original).unwrap();
    survey.unwrap()
}

#[test]
fn every_byte_that_is_flipped_or_cut_is_noticed_and_the_older_one_is_named() {
    let (_folder, archive) = archive();
    save(&archive, "step-1", 5, &[]);
    save(&archive, "step-2", 10, &["step-1"]);
    let folder = archive.path().join("step-2");
    for name in [MANIFEST, "server-0-core-0.safetensors", "server-1-core-0.safetensors"] {
        let path = folder.join(name);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            for damaged in [&damaged[..], &bytes[..at]] {
                let survey = survey_with(&archive, &path, damaged);
                let newest = survey.newest.as_ref().map(|newest| newest.folder.as_str());
                assert_eq!(newest, Some("step-1"), "byte {at} of {name}");
                let [sentence] = &survey.passed_over[..] else { panic!("one sentence") };
                assert!(sentence.contains("step-2") && sentence.ends_with("; step-1 is whole"), "{sentence}");
            }
        }
    }
}

#[test]
fn a_file_that_is_damaged_after_the_survey_is_refused_when_it_is_read() {
    let (_folder, archive) = archive();
    let manifest = save(&archive, "step-1", 5, &[]);
    let path = archive.path().join("step-1/server-1-core-0.safetensors");
    let bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        fs::write(&path, &damaged).unwrap();
        let why = restore(&archive, &manifest, &[(6, 8)]).unwrap_err();
        assert!(why.contains("is damaged"), "byte {at}: {why}");
    }
    fs::remove_file(&path).unwrap();
    let why = restore(&archive, &manifest, &[(6, 8)]).unwrap_err();
    assert!(why.contains("needs parameters of table `w` that are in server-1-core-0.safetensors"), "{why}");
    assert!(restore(&archive, &manifest, &[(0, 6)]).is_ok(), "the other server has its own");
}

#[test]
fn a_newer_format_is_told_and_passed_over() {
    let (_folder, archive) = archive();
    save(&archive, "step-1", 5, &[]);
    save(&archive, "step-2", 10, &["step-1"]);
    let path = archive.path().join("step-2").join(MANIFEST);
    let survey = survey_with(&archive, &path, b"{\"format\": 7, \"shape\": \"unknown\"}");
    assert_eq!(survey.newest.map(|newest| newest.folder).as_deref(), Some("step-1"));
    assert_eq!(
        survey.passed_over,
        [
            "the manifest of checkpoint step-2 is of format 7, and this release reads formats up to 1; step-1 is whole"
        ]
    );
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing_behind() {
    let (_folder, archive) = archive();
    let full = archive.put("step-1", "file", |out| {
        out.write_all(b"half")?;
        Err(io::Error::from(io::ErrorKind::StorageFull))
    });
    assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(fs::read_dir(archive.path().join("step-1")).unwrap().count(), 0);
    // A folder that is a file cannot be written to.
    fs::write(archive.path().join("step-2"), b"").unwrap();
    let request = Request::Write { cut: cut("step-2", 0, 0, 6), keep: vec![] };
    let Response::Written { file: Err(why), .. } = archive.carry_out(request) else { panic!("it cannot be") };
    assert!(why.starts_with("cannot write") && why.contains("step-2"), "{why}");
}
