//! The chunk size is a matter of frames alone: whatever it is, a job ends with the same parameters.

use paramill_core::policy::Axis;
use paramill_sim::report::run_scenario;
use paramill_sim::scenario::Scenario;

const ELEMENTS: u64 = 1 << 18;

#[test]
fn chunks_of_any_size_train_the_same_and_the_number_of_frames_shows_them() {
    let job = Scenario { iterations: 3, ..Scenario::new(2, 1, ELEMENTS) };
    let run = |chunk: &str| {
        let report = run_scenario(&job.clone().with(Axis::Chunk, chunk)).unwrap();
        assert!(report.finished, "{chunk}: {:?}", report.stalled);
        (report.tables[0].hash.clone(), report.frames)
    };
    let [small, usual, large] = ["4KB", "32KB", "1MB"].map(run);
    assert_eq!((&small.0, &large.0), (&usual.0, &usual.0));
    // A push and an answer of each worker in each iteration are ELEMENTS / 1024 frames or one.
    let exchanged = 2 * 2 * 3;
    let few = large.1;
    assert!(usual.1 >= few + exchanged * (ELEMENTS / 8192 - 1), "{usual:?}, {large:?}");
    assert!(small.1 >= few + exchanged * (ELEMENTS / 1024 - 1), "{small:?}, {large:?}");
}
