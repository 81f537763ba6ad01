use super::*;
use paramill_core::checkpoint::{
    ArrayKind, CutRange, FORMAT, SavedTable, SkippedRun, WorkerArray, WorkerCut, worker_file,
};
use paramill_core::policy::Policy;
use paramill_core::table::TableSpec;
use paramill_core::types::{ServerId, ShardId, WorkerId};
use std::fs;
use std::ops::Range;

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
        worker_files: vec![],
    }
}

/// A checkpoint of two servers.
fn save(archive: &Archive, folder: &str, clock: Clock, keep: &[&str]) -> Manifest {
    let keep: Vec<String> = keep.iter().map(|name| (*name).to_owned()).collect();
    let file = |server, start, len| {
        let request =
            Request::Write { cut: cut(folder, server, start, len), keep: keep.clone(), is_kept: true };
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

/// An empty archive in every storage that there is.
fn archives() -> Vec<(Option<tempfile::TempDir>, Archive)> {
    let (folder, archive) = archive();
    #[cfg(feature = "object-store")]
    let in_store = {
        let (path, storage) = ("memory://runs/job".into(), storage::in_memory());
        (None, Archive { path, storage, arriving: Arc::default() })
    };
    vec![
        (Some(folder), archive),
        #[cfg(feature = "object-store")]
        in_store,
    ]
}

/// What is in a file of an archive.
fn contents(archive: &Archive, folder: &str, name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    storage::pass_on(archive.storage.open(folder, name).unwrap().as_ref(), &mut bytes).unwrap();
    bytes
}

/// Has a file of an archive be something else.
fn overwrite(archive: &Archive, folder: &str, name: &str, bytes: &[u8]) {
    if archive.path().is_dir() {
        // Thousands of these need not survive.
        return fs::write(archive.locate(folder, name), bytes).unwrap();
    }
    let mut draft = archive.storage.create(folder, name).unwrap();
    draft.write_all(bytes).unwrap();
    draft.finish().unwrap();
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

#[test]
fn every_range_is_found_in_whichever_file_it_is() {
    for (_folder, archive) in archives() {
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
}

#[test]
fn the_newest_complete_one_is_found_and_others_go() {
    for (_folder, archive) in archives() {
        assert!(archive.survey("job").unwrap().newest.is_none());
        save(&archive, "step-1", 5, &[]);
        save(&archive, "step-2", 10, &["step-1"]);
        // Somebody was killed before the manifest was there.
        archive.carry_out(Request::Write {
            cut: cut("step-3", 0, 0, 6),
            keep: vec!["step-1".into(), "step-2".into()],
            is_kept: true,
        });
        let survey = archive.survey("job").unwrap();
        assert_eq!(survey.newest.map(|newest| newest.folder).as_deref(), Some("step-2"));
        assert_eq!(survey.kept, [(5, "step-1".to_owned()), (10, "step-2".to_owned())]);
        save(&archive, "step-4", 20, &["step-2"]);
        assert_eq!(archive.folders().unwrap(), ["step-2", "step-4"]);
        let Survey { newest, kept, .. } = archive.survey("job").unwrap();
        let mut job = Checkpointing { policy: None, resume: None, kept };
        let why = archive.check_new(&job).unwrap_err().to_string();
        assert!(why.contains("has checkpoint step-4; give --resume"), "{why}");
        job.resume = newest;
        assert!(archive.check_new(&job).is_ok());
        let why = archive.survey("other").unwrap_err().to_string();
        assert!(why.contains("has checkpoints of job `job`, and this is job `other`"), "{why}");
    }
}

#[test]
fn a_server_that_writes_for_an_order_that_was_given_up_removes_nothing_newer() {
    for (_folder, archive) in archives() {
        let name = |number| paramill_core::checkpoint::folder(number * 10, 1, number);
        let write = |number, server| {
            archive.carry_out(Request::Write {
                cut: cut(&name(number), server, 0, 6),
                keep: vec![],
                is_kept: true,
            });
        };
        write(1, 0);
        write(2, 0);
        assert_eq!(archive.folders().unwrap(), [name(2)]);
        write(1, 1);
        assert_eq!(archive.folders().unwrap(), [name(1), name(2)]);
    }
}

/// Tries `bytes` in place of a file; what the survey says then.
fn survey_with(archive: &Archive, folder: &str, name: &str, bytes: &[u8]) -> Survey {
    let original = contents(archive, folder, name);
    overwrite(archive, folder, name, bytes);
    let survey = archive.survey("job");
    overwrite(archive, folder, name, &original);
    survey.unwrap()
}

#[test]
fn every_byte_that_is_flipped_or_cut_is_noticed_and_the_older_one_is_named() {
    for (_folder, archive) in archives() {
        save(&archive, "step-1", 5, &[]);
        save(&archive, "step-2", 10, &["step-1"]);
        for name in [MANIFEST, "server-0-core-0.safetensors", "server-1-core-0.safetensors"] {
            let bytes = contents(&archive, "step-2", name);
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (at % 8);
                for damaged in [&damaged[..], &bytes[..at]] {
                    let survey = survey_with(&archive, "step-2", name, damaged);
                    let newest = survey.newest.as_ref().map(|newest| newest.folder.as_str());
                    assert_eq!(newest, Some("step-1"), "byte {at} of {name} in {archive:?}");
                    let [sentence] = &survey.passed_over[..] else { panic!("one sentence") };
                    assert!(
                        sentence.contains("step-2") && sentence.ends_with("; step-1 is whole"),
                        "{sentence}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_file_that_is_damaged_after_the_survey_is_refused_when_it_is_read() {
    for (_folder, archive) in archives() {
        let manifest = save(&archive, "step-1", 5, &[]);
        let name = "server-1-core-0.safetensors";
        let bytes = contents(&archive, "step-1", name);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            overwrite(&archive, "step-1", name, &damaged);
            let why = restore(&archive, &manifest, &[(6, 8)]).unwrap_err();
            assert!(why.contains("is damaged"), "byte {at} in {archive:?}: {why}");
        }
        archive.storage.remove("step-1", name).unwrap();
        let why = restore(&archive, &manifest, &[(6, 8)]).unwrap_err();
        assert!(
            why.contains("needs parameters of table `w` that are in server-1-core-0.safetensors"),
            "{why}"
        );
        assert!(restore(&archive, &manifest, &[(0, 6)]).is_ok(), "the other server has its own");
    }
}

#[test]
fn a_newer_format_is_told_and_passed_over() {
    for (_folder, archive) in archives() {
        save(&archive, "step-1", 5, &[]);
        save(&archive, "step-2", 10, &["step-1"]);
        let survey = survey_with(&archive, "step-2", MANIFEST, b"{\"format\": 7, \"shape\": \"unknown\"}");
        assert_eq!(survey.newest.map(|newest| newest.folder).as_deref(), Some("step-1"));
        assert_eq!(
            survey.passed_over,
            [
                "the manifest of checkpoint step-2 is of format 7, and this release reads formats up to 1; step-1 is whole"
            ]
        );
    }
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
    let request = Request::Write { cut: cut("step-2", 0, 0, 6), keep: vec![], is_kept: true };
    let Response::Written { file: Err(why), .. } = archive.carry_out(request) else { panic!("it cannot be") };
    assert!(why.starts_with("cannot write") && why.contains("step-2"), "{why}");
}

#[test]
fn what_a_command_reads_is_in_memory_where_there_is_no_archive() {
    let mut place = Place::default();
    let write = |is_kept| Request::Write { cut: cut("step-1", 0, 0, 6), keep: vec![], is_kept };
    let Response::Written { file: Err(why), .. } = place.carry_out(write(true)) else {
        panic!("it is refused")
    };
    assert!(why.contains("start every server with --checkpoint DIR"), "{why}");
    let Response::Written { file: Ok(saved), .. } = place.carry_out(write(false)) else {
        panic!("it is taken")
    };
    let mut read = |place_of: &str, start| {
        let request = PartPlace { reader: 3, folder: "step-1".into(), file: place_of.into(), start };
        match place.carry_out(Request::Read(request.clone())) {
            Response::Read(told, part) if told == request => part,
            other => panic!("{other:?}"),
        }
    };
    let whole = read(&saved.name, 0).unwrap();
    assert_eq!((whole.len() as u64, file::digest(&whole)), (saved.bytes, saved.digest));
    assert_eq!(read(&saved.name, 8).unwrap(), whole[8..]);
    assert!(read(&saved.name, u64::MAX).unwrap().is_empty());
    assert!(read("another", 0).is_err());
}

#[test]
fn an_archive_gives_parts_of_its_own_files_only() {
    let (folder, archive) = archive();
    save(&archive, "step-1", 5, &[]);
    fs::write(folder.path().join("secret"), "secret").unwrap();
    let read = |folder: &str, file: &str, start| {
        let place = PartPlace { reader: 1, folder: folder.into(), file: file.into(), start };
        match archive.carry_out(Request::Read(place)) {
            Response::Read(_, part) => part,
            other => panic!("{other:?}"),
        }
    };
    let name = "server-0-core-0.safetensors";
    let whole = fs::read(archive.path().join("step-1").join(name)).unwrap();
    assert_eq!(read("step-1", name, 0).unwrap(), whole);
    assert!(read("step-1", name, whole.len() as u64).unwrap().is_empty());
    for (folder, file) in [("..", "secret"), ("step-1", "../../secret"), ("step-2", name)] {
        assert!(read(folder, file, 0).is_err(), "{folder}/{file}");
    }
}

/// What a worker kept: of two tables, and a note.
fn kept(worker: u32, len: usize) -> WorkerCut {
    let array = |kind, values: Vec<f32>, state: &[u8]| WorkerArray {
        table: "w".into(),
        kind,
        values,
        state: state.to_vec(),
    };
    let residual = (0..len).map(|at| at as f32 - worker as f32).collect();
    WorkerCut {
        folder: "step-1".into(),
        job: "job".into(),
        clock: 5,
        worker: WorkerId(worker),
        arrays: vec![
            array(ArrayKind::Residual, residual, b"topk:0.01"),
            array(ArrayKind::Factors(3), vec![-0.0, f32::MIN_POSITIVE], &[]),
        ],
        notes: [("sampler".to_owned(), vec![0, 255, 16])].into(),
    }
}

/// Reads a file part by part.
fn read_all(place: &mut Place, file: &SavedFile) -> Result<Vec<u8>, String> {
    let mut bytes: Vec<u8> = Vec::new();
    while (bytes.len() as u64) < file.bytes {
        let start = bytes.len() as u64;
        let at = PartPlace { reader: 0, folder: "step-1".into(), file: file.name.clone(), start };
        match place.carry_out(Request::Read(at)) {
            Response::Read(_, part) => bytes.extend(part?),
            other => panic!("{other:?}"),
        }
    }
    Ok(bytes)
}

fn pack(place: &mut Place, cut: &WorkerCut) -> SavedFile {
    match place.carry_out(Request::Pack { cut: Box::new(cut.clone()), is_kept: true }) {
        Response::Written { file: Ok(file), .. } => file,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_worker_kept_comes_in_parts_to_the_archive_and_back() {
    for (_folder, archive) in archives() {
        let (mut worker, mut coordinator) = (Place::default(), Place::new(Some(archive.clone()), None));
        // More than one part.
        let cut = kept(1, limits::MAX_PART_BYTES / 4 + 10);
        let saved = pack(&mut worker, &cut);
        let bytes = read_all(&mut worker, &saved).unwrap();
        assert!(read_all(&mut worker, &saved).is_err(), "its memory is free again");
        let append = |start: usize, part: &[u8]| {
            let place = PartPlace {
                reader: 0,
                folder: "step-1".into(),
                file: saved.name.clone(),
                start: start as u64,
            };
            archive.carry_out(Request::Append { place, bytes: part.to_vec(), whole: saved.clone() })
        };
        let is_there = || archive.find("step-1", &worker_file(WorkerId(1))).unwrap().is_some();
        for (number, part) in bytes.chunks(limits::MAX_PART_BYTES).enumerate() {
            assert!(!is_there(), "it has its name when it is whole");
            let answer = append(number * limits::MAX_PART_BYTES, part);
            assert!(matches!(answer, Response::Appended(_, Ok(written)) if written == part.len() as u64));
        }
        let again = read_all(&mut coordinator, &saved).unwrap();
        let unpack = |bytes: Vec<u8>| match Place::default()
            .carry_out(Request::Unpack { file: saved.clone(), bytes })
        {
            Response::Unpacked(unpacked) => unpacked,
            other => panic!("{other:?}"),
        };
        assert_eq!(unpack(again.clone()), Ok(Box::new(cut)));
        let mut damaged = again;
        damaged[4000] ^= 1;
        assert!(unpack(damaged.clone()).unwrap_err().contains("is damaged"));
        // What is not what the worker announced does not get its name.
        archive.storage.remove("step-1", &saved.name).unwrap();
        append(0, &damaged[..limits::MAX_PART_BYTES]);
        let answer = append(limits::MAX_PART_BYTES, &damaged[limits::MAX_PART_BYTES..]);
        assert!(matches!(answer, Response::Appended(_, Err(why)) if why.contains("is damaged")));
        assert!(!is_there(), "{archive:?}");
        if let Some(folder) = &_folder {
            assert_eq!(fs::read_dir(folder.path().join("checkpoints/step-1")).unwrap().count(), 0);
        }
    }
}

#[test]
fn a_checkpoint_without_a_worker_s_file_is_passed_over() {
    for (_folder, archive) in archives() {
        save(&archive, "step-0", 3, &[]);
        let mut manifest = save(&archive, "step-1", 5, &["step-0"]);
        let saved = pack(&mut Place::default(), &kept(0, 4));
        manifest.worker_files = vec![WorkerFile { worker: WorkerId(0), file: saved }];
        archive.carry_out(Request::Complete { manifest: Box::new(manifest), keep: vec!["step-0".into()] });
        let survey = archive.survey("job").unwrap();
        assert_eq!(survey.newest.map(|newest| newest.folder).as_deref(), Some("step-0"));
        assert!(survey.passed_over[0].contains("worker-0.safetensors"), "{:?}", survey.passed_over);
    }
}

#[cfg(feature = "object-store")]
#[test]
fn a_large_object_is_sent_in_parts_and_is_not_there_before_it_is_whole() {
    let storage = storage::in_memory();
    let bytes: Vec<u8> = (0..40u32 << 18).flat_map(|number| number.to_le_bytes()).collect();
    let mut draft = storage.create("step-1", "large").unwrap();
    draft.write_all(&bytes).unwrap();
    assert_eq!(storage.folders().unwrap(), [""; 0], "it was given to a request");
    draft.finish().unwrap();
    let source = storage.open("step-1", "large").unwrap();
    let mut read = Vec::new();
    storage::pass_on(source.as_ref(), &mut read).unwrap();
    assert!(read == bytes);
    let mut part = [0; 8];
    source.read_at((16 << 20) - 4, &mut part).unwrap();
    assert_eq!(part, bytes[(16 << 20) - 4..][..8], "across the border of two parts");
    assert!(source.read_at(bytes.len() as u64 - 4, &mut part).is_err());
    // One that is given up leaves nothing.
    storage.create("step-2", "large").unwrap().write_all(&bytes).unwrap();
    assert_eq!(storage.folders().unwrap(), ["step-1"]);
    storage.remove_folder("step-1").unwrap();
    assert_eq!(storage.folders().unwrap(), [""; 0]);
}

#[test]
fn places_that_are_neither_a_folder_nor_a_store_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made");
    Archive::open(format!("file://{}", path.display())).unwrap();
    assert!(path.is_dir());
    let refusal = |place: &str| Archive::open(place).unwrap_err().to_string();
    let why = refusal("file://folder");
    assert_eq!(why, "cannot use file://folder for checkpoints: expected file:///FOLDER");
    #[cfg(not(feature = "object-store"))]
    for url in ["s3://bucket/job", "other://bucket"] {
        let why = refusal(url);
        assert!(why.starts_with("cannot use") && why.contains("the cargo feature `object-store`"), "{why}");
    }
    #[cfg(feature = "object-store")]
    for url in ["other://bucket/job", "s3://bucket/a//b"] {
        assert!(refusal(url).starts_with(&format!("cannot use {url} for checkpoints: ")), "{url}");
    }
}
