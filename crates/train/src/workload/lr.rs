//! Logistic regression on examples with few features each.
//!
//! One table `weights` with a row for each feature and a last one for the bias. A batch pulls and pushes the rows of
//! the features that its examples have.

use super::{Evaluation, Factory, Touched, Workload, WorkloadConfig, WorkloadInfo};
use crate::data::{DataError, Place, SparseExamples, libsvm};
use crate::generate;
use crate::metrics;
use crate::shard::{Sampler, hold_out};
use paramill_core::table::TableSpec;
use std::sync::Arc;

pub(super) static INFO: WorkloadInfo = WorkloadInfo {
    name: "lr",
    summary: "Sparse logistic regression; a batch touches only the weights of its examples' features.",
    data: "a libsvm file, plain or gzip",
    optimizer: "adagrad:lr=0.1",
    epochs: 5,
    batch: 64,
    metric: "auc",
    load,
};

struct Data {
    train: SparseExamples,
    test: SparseExamples,
    features: u32,
}

fn load(config: &WorkloadConfig) -> Result<Factory, DataError> {
    let (mut train, test) = match (&config.data, &config.test) {
        (Some(data), Some(test)) => (libsvm::read(data)?, libsvm::read(test)?),
        (Some(data), None) => {
            let all = libsvm::read(data)?;
            let (train, test) = hold_out(all.len(), config.seed);
            (all.select(&train), all.select(&test))
        }
        (None, _) => {
            let made = generate::sparse_examples(config.seed, config.examples.unwrap_or(20_000));
            (made.train, made.test)
        }
    };
    // The width is that of all the data, so that a limit on the examples does not change the tables.
    let features = train.width().max(test.width());
    if let Some(limit) = config.examples.filter(|&limit| limit < train.len()) {
        train = train.select(&(0..limit).collect::<Vec<_>>());
    }
    Sampler::check(train.len(), config.workers)?;
    check_both_labels(&test, config)?;

    let data = Arc::new(Data { train, test, features });
    let config = config.clone();
    Ok(Box::new(move |rank| Box::new(LogisticRegression::new(data.clone(), &config, rank))))
}

fn check_both_labels(test: &SparseExamples, config: &WorkloadConfig) -> Result<(), DataError> {
    if test.labels().contains(&true) && test.labels().contains(&false) {
        return Ok(());
    }
    let path = config.test.as_ref().or(config.data.as_ref()).cloned().unwrap_or_default();
    Err(DataError::Malformed {
        path,
        place: Place::File,
        expected: "held-out examples of both labels, to compute the AUC".into(),
        found: format!("{} of one label", test.len()),
    })
}

struct LogisticRegression {
    data: Arc<Data>,
    sampler: Sampler,
    l2: f32,
    /// The examples of the prepared batch.
    batch: Vec<u32>,
    /// For each entry of the batch's examples, one after the other: the place of its feature among the touched rows.
    places: Vec<u32>,
    touched: usize,
}

impl LogisticRegression {
    fn new(data: Arc<Data>, config: &WorkloadConfig, rank: u32) -> LogisticRegression {
        let sampler = Sampler::new(data.train.len(), config.batch, config.seed, rank, config.workers);
        let l2 = config.l2.unwrap_or(0.0);
        LogisticRegression { data, sampler, l2, batch: Vec::new(), places: Vec::new(), touched: 0 }
    }
}

impl Workload for LogisticRegression {
    fn name(&self) -> &'static str {
        INFO.name
    }

    fn tables(&self) -> Vec<TableSpec> {
        vec![TableSpec::sparse("weights", u64::from(self.data.features) + 1, 1)]
    }

    fn initial(&self, _table: usize) -> Vec<f32> {
        vec![0.0; self.data.features as usize + 1]
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch()
    }

    fn prepare(&mut self, step: u64) -> Vec<Touched> {
        self.batch.clear();
        self.batch.extend_from_slice(self.sampler.batch(step));
        let features = || self.batch.iter().flat_map(|&example| self.data.train.example(example as usize).0);

        let mut rows: Vec<u32> = features().copied().collect();
        rows.push(self.data.features);
        rows.sort_unstable();
        rows.dedup();

        self.places.clear();
        let place =
            |feature| rows.binary_search(feature).expect("every feature of the batch is among its rows");
        self.places.extend(features().map(|feature| place(feature) as u32));
        self.touched = rows.len();
        vec![Touched::Rows(rows)]
    }

    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32 {
        let (weights, gradient) = (parameters[0], &mut gradients[0]);
        assert!(!self.batch.is_empty(), "prepare comes before step");
        assert_eq!(weights.len(), self.touched, "one weight for each touched row");
        // A penalised weight is pulled back in the steps that touch it; the others stay as they are.
        gradient.clear();
        gradient.extend(weights.iter().map(|weight| self.l2 * weight));
        let bias = self.touched - 1;
        gradient[bias] = 0.0;

        let share = 1.0 / self.batch.len() as f32;
        let (mut loss, mut places) = (0.0, self.places.as_slice());
        for &example in &self.batch {
            let (_, values) = self.data.train.example(example as usize);
            let (here, rest) = places.split_at(values.len());
            places = rest;
            let products = here.iter().zip(values).map(|(&place, value)| weights[place as usize] * value);
            let score = weights[bias] + products.sum::<f32>();
            let positive = self.data.train.labels()[example as usize];
            loss += metrics::logistic_loss(score, positive);
            let slope = share * (metrics::sigmoid(score) - f32::from(u8::from(positive)));
            for (&place, value) in here.iter().zip(values) {
                gradient[place as usize] += slope * value;
            }
            gradient[bias] += slope;
        }
        loss * share
    }

    fn evaluate(&self, parameters: &[&[f32]]) -> Evaluation {
        let weights = parameters[0];
        let bias = weights[self.data.features as usize];
        let test = &self.data.test;
        let score = |example| {
            let (features, values) = test.example(example);
            let products =
                features.iter().zip(values).map(|(&feature, value)| weights[feature as usize] * value);
            bias + products.sum::<f32>()
        };
        let scores: Vec<f32> = (0..test.len()).map(score).collect();
        let losses =
            scores.iter().zip(test.labels()).map(|(&s, &positive)| metrics::logistic_loss(s, positive));
        Evaluation {
            loss: losses.map(f64::from).sum::<f64>() / test.len() as f64,
            metric: INFO.metric,
            value: metrics::auc(&scores, test.labels()),
            extra: vec![("accuracy".into(), metrics::binary_accuracy(&scores, test.labels()))],
        }
    }
}
