//! What every workload promises to whoever drives it, checked on all that are known.

use paramill_train::{
    LayerFlow, ProductGradient, Touched, Workload, WorkloadConfig, build, build_all, generate, known,
};
use std::ops::Range;

/// Small enough for debug builds.
fn small(name: &str, workers: u32) -> WorkloadConfig {
    let mut config = WorkloadConfig::new(name).expect("a known workload");
    (config.workers, config.examples, config.batch) = (workers, Some(203), 8);
    (config.hidden, config.factors) = (6, 3);
    // The penalty is part of the gradient but not of the loss that is reported.
    config.l2 = Some(0.0);
    config
}

/// The parameters that a step needs, and where they lie in their tables.
fn pull(workload: &mut dyn Workload, step: u64, tables: &[Vec<f32>]) -> Vec<(Vec<usize>, Vec<f32>)> {
    let specs = workload.tables();
    let touched = workload.prepare(step);
    assert_eq!(touched.len(), specs.len());
    let elements = |table: usize| -> Vec<usize> {
        let width = specs[table].row_elements() as usize;
        match &touched[table] {
            Touched::All => (0..tables[table].len()).collect(),
            Touched::Rows(rows) => {
                rows.iter().flat_map(|&row| row as usize * width..(row as usize + 1) * width).collect()
            }
        }
    };
    (0..specs.len())
        .map(|table| {
            let elements = elements(table);
            let values = elements.iter().map(|&element| tables[table][element]).collect();
            (elements, values)
        })
        .collect()
}

fn step(workload: &mut dyn Workload, pulled: &[(Vec<usize>, Vec<f32>)]) -> (f32, Vec<Vec<f32>>) {
    let parameters: Vec<&[f32]> = pulled.iter().map(|(_, values)| values.as_slice()).collect();
    // What is left from another step must not matter.
    let mut gradients = vec![vec![f32::NAN; 3]; pulled.len()];
    let loss = workload.step(&parameters, &mut gradients);
    (loss, gradients)
}

fn initial(workload: &dyn Workload) -> Vec<Vec<f32>> {
    (0..workload.tables().len()).map(|table| workload.initial(table)).collect()
}

#[test]
fn all_ranks_agree_on_tables_values_and_steps() {
    for info in known() {
        let workers = build_all(&small(info.name, 3)).unwrap();
        assert_eq!(workers.len(), 3);
        for worker in &workers {
            assert_eq!(worker.name(), info.name);
            assert_eq!(worker.tables(), workers[0].tables());
            assert_eq!(initial(worker.as_ref()), initial(workers[0].as_ref()));
            assert_eq!(worker.steps_per_epoch(), 203 / 3 / 8);
        }
        for (spec, values) in workers[0].tables().iter().zip(initial(workers[0].as_ref())) {
            spec.check().unwrap();
            assert_eq!(values.len() as u64, spec.elements(), "{}", spec.name);
        }
    }
}

#[test]
fn a_rank_is_the_same_alone_and_among_all_and_differs_from_others() {
    for info in known() {
        let mut config = small(info.name, 2);
        let mut all = build_all(&config).unwrap();
        config.rank = 1;
        let mut alone = build(&config).unwrap();
        let tables = initial(alone.as_ref());
        // The one alone takes its steps in another order.
        let later = pull(alone.as_mut(), 40, &tables);
        let last = step(alone.as_mut(), &later);
        for number in [0, 40] {
            let pulled = pull(alone.as_mut(), number, &tables);
            let expected = step(alone.as_mut(), &pulled);
            assert_eq!(pull(all[1].as_mut(), number, &tables), pulled, "{}", info.name);
            assert_eq!(step(all[1].as_mut(), &pulled), expected, "{}", info.name);
            let other = pull(all[0].as_mut(), number, &tables);
            assert_ne!(step(all[0].as_mut(), &other), expected, "{}", info.name);
        }
        assert_eq!(pull(alone.as_mut(), 40, &tables), later);
        assert_eq!(step(alone.as_mut(), &later), last);
    }
}

#[test]
fn sparse_tables_name_their_rows_in_order_and_dense_ones_are_whole() {
    for info in known() {
        let mut workload = build(&small(info.name, 1)).unwrap();
        for number in 0..30 {
            for (spec, touched) in workload.tables().iter().zip(workload.prepare(number)) {
                match touched {
                    Touched::All => assert!(!spec.rows, "{}", spec.name),
                    Touched::Rows(rows) => {
                        assert!(spec.rows && !rows.is_empty(), "{}", spec.name);
                        assert!(rows.is_sorted_by(|a, b| a < b), "{rows:?}");
                        assert!(u64::from(rows[rows.len() - 1]) < spec.shape[0]);
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_agree_with_differences_of_the_loss() {
    // Small, for a rectifier or a maximum may switch within it.
    const STEP: f32 = 2e-3;
    for info in known() {
        let mut workload = build(&small(info.name, 1)).unwrap();
        let tables = initial(workload.as_ref());
        let mut pulled = pull(workload.as_mut(), 5, &tables);
        let (_, gradients) = step(workload.as_mut(), &pulled);
        for table in 0..pulled.len() {
            let len = pulled[table].1.len();
            assert_eq!(gradients[table].len(), len);
            for element in (0..len).step_by(len / 40 + 1) {
                let kept = pulled[table].1[element];
                let mut loss_at = |value: f32| {
                    pulled[table].1[element] = value;
                    f64::from(step(workload.as_mut(), &pulled).0)
                };
                let (above, below) = (loss_at(kept + STEP), loss_at(kept - STEP));
                loss_at(kept);
                let difference = (above - below) / (2.0 * f64::from(STEP));
                let error = (difference - f64::from(gradients[table][element])).abs();
                let name = info.name;
                assert!(
                    error < 2e-2 * (1.0 + difference.abs()),
                    "{name}: {difference}, {}",
                    gradients[table][element]
                );
            }
        }
    }
}

#[test]
fn the_penalty_pulls_towards_zero_but_never_the_bias_of_lr() {
    let gradient = |l2: f32| {
        let mut config = small("lr", 1);
        config.l2 = Some(l2);
        let mut workload = build(&config).unwrap();
        let tables = vec![vec![2.0; workload.initial(0).len()]];
        let pulled = pull(workload.as_mut(), 0, &tables);
        step(workload.as_mut(), &pulled).1.remove(0)
    };
    let (without, with) = (gradient(0.0), gradient(0.5));
    let bias = without.len() - 1;
    for (row, (without, with)) in without.iter().zip(&with).enumerate() {
        let expected = if row == bias { *without } else { without + 1.0 };
        assert!((with - expected).abs() < 1e-5, "row {row}");
    }
}

#[test]
fn made_data_written_to_files_is_trained_on() {
    for gzip in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let [train, test] = generate::write_sparse_examples(folder.path(), 1, 203, gzip).unwrap();
        let ratings = generate::write_ratings(folder.path(), 1, 300, gzip).unwrap();
        generate::write_images(folder.path(), 1, 203, gzip).unwrap();
        for info in known() {
            let made = small(info.name, 2);
            let mut config = small(info.name, 2);
            match info.name {
                "lr" => (config.data, config.test) = (Some(train.clone()), Some(test.clone())),
                "mf" => config.data = Some(ratings.clone()),
                _ => config.data = Some(folder.path().to_owned()),
            }
            let mut workload = build(&config).unwrap();
            let tables = initial(workload.as_ref());
            let pulled = pull(workload.as_mut(), 0, &tables);
            let from_files = step(workload.as_mut(), &pulled);
            assert!(from_files.0.is_finite() && from_files.0 > 0.0);
            if info.name != "mf" {
                // The very numbers that are made without files.
                let mut workload = build(&made).unwrap();
                let pulled = pull(workload.as_mut(), 0, &tables);
                assert_eq!(step(workload.as_mut(), &pulled), from_files, "{}", info.name);
            }
        }
    }
}

#[test]
fn without_test_data_a_fifth_is_held_out_by_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    let [train, _] = generate::write_sparse_examples(folder.path(), 1, 500, true).unwrap();
    let loss = |seed: u64| {
        let mut config = WorkloadConfig::new("lr").unwrap();
        (config.data, config.seed, config.batch) = (Some(train.clone()), seed, 100);
        let workload = build(&config).unwrap();
        assert_eq!(workload.steps_per_epoch(), 4);
        let weights: Vec<f32> = (0..workload.initial(0).len()).map(|row| row as f32 * 1e-3).collect();
        workload.evaluate(&[&weights]).loss
    };
    assert_eq!(loss(1), loss(1));
    assert_ne!(loss(1), loss(2));
}

#[test]
fn what_cannot_work_is_refused_with_the_reason() {
    type Change<'a> = &'a dyn Fn(&mut WorkloadConfig);
    let error = |change: Change<'_>| {
        let mut config = small("cnn", 2);
        change(&mut config);
        match build(&config) {
            Ok(_) => panic!("built {config:?}"),
            Err(error) => error.to_string(),
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().to_owned();
    let cases: [(Change<'_>, &str); 11] = [
        (&|config| config.name = "svm".into(), "unknown workload `svm`; known: lr, mf, mlp, cnn"),
        (&|config| config.batch = 0, "batch = 0"),
        (&|config| config.rank = 2, "rank = 2 of 2 workers"),
        (&|config| config.workers = 0, "rank = 0 of 0 workers"),
        (&|config| config.examples = Some(0), "examples = 0"),
        (&|config| config.examples = Some(usize::MAX), "at most 1000000 are made"),
        (&|config| config.examples = Some(1), "1 training examples cannot be dealt to 2 workers"),
        (&|config| config.hidden = 0, "hidden = 0: expected 1 to 4096"),
        (&|config| config.l2 = Some(-1.0), "l2 = -1"),
        (&|config| config.test = Some("somewhere".into()), "test data without training data"),
        (&|config| config.data = Some(data.clone()), "expected a file `train-images-idx3-ubyte`"),
    ];
    for (change, expected) in cases {
        let error = error(change);
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn data_that_a_model_cannot_use_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one-label.svm");
    std::fs::write(&path, "1 1:1\n".repeat(10)).unwrap();
    let mut config = small("lr", 1);
    config.data = Some(path);
    let error = build(&config).err().unwrap().to_string();
    assert!(error.contains("expected held-out examples of both labels"), "{error}");

    let path = folder.path().join("few.csv");
    std::fs::write(&path, "1,2,3\n").unwrap();
    let mut config = small("mf", 1);
    config.data = Some(path);
    let error = build(&config).err().unwrap().to_string();
    assert!(error.contains("too few to hold out a fifth"), "{error}");

    use paramill_train::data::{Images, idx};
    let tiny = Images { height: 6, width: 6, pixels: vec![9; 36 * 20], labels: vec![1; 20] };
    for half in [idx::Half::Train, idx::Half::Test] {
        idx::write(folder.path(), half, &tiny, false).unwrap();
    }
    let mut config = small("cnn", 1);
    config.data = Some(folder.path().to_owned());
    let error = build(&config).err().unwrap().to_string();
    assert!(error.contains("images of 6 x 6: cnn needs 10 x 10"), "{error}");
    config.name = "mlp".into();
    assert!(build(&config).is_ok());
}

/// A damaged label made a model of 100 classes, 90 of which nothing belongs to.
#[test]
fn labels_that_no_class_has_are_refused_with_their_place() {
    use paramill_train::data::{Images, idx};
    let images = |labels: &[u8]| Images {
        height: 10,
        width: 10,
        pixels: vec![9; 100 * labels.len()],
        labels: labels.to_vec(),
    };
    let outcome = |train: &[u8], test: &[u8]| {
        let folder = tempfile::tempdir().unwrap();
        idx::write(folder.path(), idx::Half::Train, &images(train), true).unwrap();
        idx::write(folder.path(), idx::Half::Test, &images(test), false).unwrap();
        let mut config = small("mlp", 1);
        config.data = Some(folder.path().to_owned());
        build(&config).map(|workload| workload.tables()).map_err(|error| error.to_string())
    };
    for (train, test, expected) in [
        (
            &[0, 1, 99, 2][..],
            &[1][..],
            "train-labels-idx1-ubyte.gz, byte 10: expected a label from 0 to 2, as no image has the label 3, found 99",
        ),
        (
            &[2, 0, 1],
            &[0, 3],
            "t10k-labels-idx1-ubyte, byte 9: expected a label from 0 to 2, as in the training data, found 3",
        ),
        (&[1, 2], &[2, 0], "byte 9: expected a label from 1 to 2, as in the training data, found 0"),
        (&[0, 0], &[0], "expected at least two classes"),
    ] {
        let error = outcome(train, test).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let classes = |tables: Vec<paramill_core::table::TableSpec>| tables.last().map(|bias| bias.shape.clone());
    assert_eq!(classes(outcome(&[0, 1, 2], &[1]).unwrap()), Some(vec![3]));
    // Some sets count from 1.
    assert_eq!(classes(outcome(&[1, 2, 3], &[1]).unwrap()), Some(vec![4]));
}

/// Notes what a step asks for and hands over.
struct Noted<'a> {
    pulled: &'a [(Vec<usize>, Vec<f32>)],
    events: Vec<Event>,
    gradients: Vec<Vec<f32>>,
    /// Fails with the event of this number.
    fails_at: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    Fetched(usize),
    Ready(usize),
}

impl Noted<'_> {
    fn note(&mut self, event: Event) -> bool {
        self.events.push(event);
        self.events.len() <= self.fails_at
    }
}

impl LayerFlow for Noted<'_> {
    fn fetch(&mut self, mut tables: Range<usize>) -> bool {
        tables.all(|table| self.note(Event::Fetched(table)))
    }

    fn values(&self, table: usize) -> &[f32] {
        assert!(self.events.contains(&Event::Fetched(table)), "table {table} was not asked for");
        &self.pulled[table].1
    }

    fn ready(&mut self, table: usize, gradient: &[f32], _product: Option<ProductGradient<'_>>) -> bool {
        self.gradients[table] = gradient.to_vec();
        self.note(Event::Ready(table))
    }
}

#[test]
fn a_step_by_layers_is_the_same_step_and_ends_when_it_is_told_to() {
    for info in known() {
        let mut workload = build(&small(info.name, 1)).unwrap();
        let tables = initial(workload.as_ref());
        let pulled = pull(workload.as_mut(), 3, &tables);
        let (loss, gradients) = step(workload.as_mut(), &pulled);
        let count = tables.len();
        for fails_at in 0..=2 * count {
            let mut flow =
                Noted { pulled: &pulled, events: Vec::new(), gradients: vec![Vec::new(); count], fails_at };
            let mut own = vec![vec![f32::NAN; 3]; count];
            let by_layers = workload.step_by_layers(&mut own, &mut flow);
            if fails_at < 2 * count {
                assert_eq!((by_layers, flow.events.len()), (None, fails_at + 1), "{}", info.name);
                continue;
            }
            assert_eq!(by_layers, Some(loss), "{}", info.name);
            assert_eq!((&flow.gradients, &own), (&gradients, &gradients), "{}: bit for bit", info.name);
            let fetched: Vec<Event> = (0..count).map(Event::Fetched).collect();
            assert_eq!(flow.events[..count], fetched[..], "{}: front to back", info.name);
            // The last layer's gradient is handed over before those of the layers in front of it.
            assert!(matches!(flow.events[count], Event::Ready(first) if first + 2 >= count), "{}", info.name);
        }
    }
}
