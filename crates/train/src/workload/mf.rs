//! Matrix factorisation of ratings.
//!
//! A rating is predicted as the training mean, plus the user's and the item's bias, plus the product of their vectors.
//! A row of the tables `users` and `items` is a vector with the bias in the last column. A batch pulls and pushes the
//! rows of its users and items.

use super::{Evaluation, Factory, Touched, Workload, WorkloadConfig, WorkloadInfo};
use crate::data::{DataError, Rating, ratings};
use crate::generate;
use crate::shard::{Sampler, Stream, hold_out};
use paramill_core::table::TableSpec;
use std::sync::Arc;

pub(super) static INFO: WorkloadInfo = WorkloadInfo {
    name: "mf",
    summary: "Matrix factorisation of ratings; a batch touches only the rows of its users and items.",
    data: "a CSV file of user,item,rating, plain or gzip",
    optimizer: "adagrad:lr=0.1",
    epochs: 6,
    batch: 128,
    metric: "rmse",
    load,
};

const DEFAULT_L2: f32 = 0.1;
/// Deviation of the initial vectors: they must differ, and their products must be small beside a rating.
const INITIAL_DEVIATION: f64 = 0.1;

struct Data {
    train: Vec<Rating>,
    test: Vec<Rating>,
    users: u32,
    items: u32,
    mean: f32,
    /// The smallest and the largest rating seen in training; predictions are judged within them.
    range: (f32, f32),
}

fn load(config: &WorkloadConfig) -> Result<Factory, DataError> {
    let (mut train, mut test) = match (&config.data, &config.test) {
        (Some(data), Some(test)) => (ratings::read(data)?, ratings::read(test)?),
        (Some(data), None) => {
            let all = ratings::read(data)?;
            let (train, test) = hold_out(all.len(), config.seed);
            let pick = |chosen: Vec<usize>| chosen.into_iter().map(|index| all[index]).collect();
            (pick(train), pick(test))
        }
        (None, _) => {
            let made = generate::ratings(config.seed, config.examples.unwrap_or(40_000));
            (made.train, made.test)
        }
    };
    if test.is_empty() {
        let why = format!("{} ratings are too few to hold out a fifth of them", train.len());
        return Err(DataError::Config { why });
    }
    // Numbered over all the data, so that a limit on the examples does not change the tables.
    let users = number_from_zero(&mut train, &mut test, |rating| &mut rating.user);
    let items = number_from_zero(&mut train, &mut test, |rating| &mut rating.item);
    train.truncate(config.examples.unwrap_or(usize::MAX));
    Sampler::check(train.len(), config.workers)?;

    let mean = train.iter().map(|rating| f64::from(rating.value)).sum::<f64>() / train.len() as f64;
    let range = train.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), rating| {
        (low.min(rating.value), high.max(rating.value))
    });
    let data = Arc::new(Data { train, test, users, items, mean: mean as f32, range });
    let config = config.clone();
    Ok(Box::new(move |rank| Box::new(MatrixFactorization::new(data.clone(), &config, rank))))
}

/// Replaces the numbers of one column by consecutive ones in the same order, and says how many there are.
fn number_from_zero(train: &mut [Rating], test: &mut [Rating], column: fn(&mut Rating) -> &mut u32) -> u32 {
    let mut numbers: Vec<u32> = train.iter_mut().chain(&mut *test).map(|rating| *column(rating)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    for number in train.iter_mut().chain(test).map(column) {
        *number = numbers.binary_search(number).expect("every number was collected") as u32;
    }
    numbers.len() as u32
}

struct MatrixFactorization {
    data: Arc<Data>,
    sampler: Sampler,
    seed: u64,
    factors: usize,
    l2: f32,
    /// The prepared batch; users and items are places among the touched rows.
    batch: Vec<Rating>,
    touched: [usize; 2],
}

impl MatrixFactorization {
    fn new(data: Arc<Data>, config: &WorkloadConfig, rank: u32) -> MatrixFactorization {
        MatrixFactorization {
            sampler: Sampler::new(data.train.len(), config.batch, config.seed, rank, config.workers),
            data,
            seed: config.seed,
            factors: config.factors,
            l2: config.l2.unwrap_or(DEFAULT_L2),
            batch: Vec::new(),
            touched: [0, 0],
        }
    }

    /// Columns of a row: the vector and the bias.
    fn width(&self) -> usize {
        self.factors + 1
    }

    fn predict(&self, user: &[f32], item: &[f32]) -> f32 {
        let product: f32 = user[..self.factors].iter().zip(item).map(|(u, i)| u * i).sum();
        self.data.mean + user[self.factors] + item[self.factors] + product
    }
}

impl Workload for MatrixFactorization {
    fn name(&self) -> &'static str {
        INFO.name
    }

    fn tables(&self) -> Vec<TableSpec> {
        let width = self.width() as u64;
        vec![
            TableSpec::sparse("users", u64::from(self.data.users), width),
            TableSpec::sparse("items", u64::from(self.data.items), width),
        ]
    }

    fn initial(&self, table: usize) -> Vec<f32> {
        let rows = [self.data.users, self.data.items][table] as usize;
        let mut prng = Stream::Initial.prng(self.seed, table as u64);
        let mut values = vec![0.0; rows * self.width()];
        for row in values.chunks_exact_mut(self.width()) {
            row[..self.factors].fill_with(|| (INITIAL_DEVIATION * prng.normal()) as f32);
        }
        values
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch()
    }

    fn prepare(&mut self, step: u64) -> Vec<Touched> {
        let train = &self.data.train;
        self.batch.clear();
        self.batch.extend(self.sampler.batch(step).iter().map(|&example| train[example as usize]));
        let rows = |column: fn(&Rating) -> u32| {
            let mut rows: Vec<u32> = self.batch.iter().map(column).collect();
            rows.sort_unstable();
            rows.dedup();
            rows
        };
        let (users, items) = (rows(|rating| rating.user), rows(|rating| rating.item));
        let place = |rows: &[u32], row: u32| {
            rows.binary_search(&row).expect("every row of the batch is among its rows") as u32
        };
        for rating in &mut self.batch {
            rating.user = place(&users, rating.user);
            rating.item = place(&items, rating.item);
        }
        self.touched = [users.len(), items.len()];
        vec![Touched::Rows(users), Touched::Rows(items)]
    }

    /// The loss is the squared error. The penalty of a row weighs as often as the batch has a rating of it.
    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32 {
        assert!(!self.batch.is_empty(), "prepare comes before step");
        let (width, factors) = (self.width(), self.factors);
        for (table, gradient) in gradients.iter_mut().enumerate() {
            assert_eq!(parameters[table].len(), self.touched[table] * width, "one row for each touched one");
            gradient.clear();
            gradient.resize(parameters[table].len(), 0.0);
        }
        let [user_gradients, item_gradients] = gradients else {
            panic!("one gradient for each of two tables")
        };
        let share = 2.0 / self.batch.len() as f32;
        let mut squares = 0.0;
        for rating in &self.batch {
            let (at_user, at_item) = (rating.user as usize * width, rating.item as usize * width);
            let (user, item) =
                (&parameters[0][at_user..at_user + width], &parameters[1][at_item..at_item + width]);
            let error = self.predict(user, item) - rating.value;
            squares += error * error;
            let user_gradient = &mut user_gradients[at_user..at_user + width];
            let item_gradient = &mut item_gradients[at_item..at_item + width];
            for column in 0..factors {
                user_gradient[column] += share * (error * item[column] + self.l2 * user[column]);
                item_gradient[column] += share * (error * user[column] + self.l2 * item[column]);
            }
            user_gradient[factors] += share * (error + self.l2 * user[factors]);
            item_gradient[factors] += share * (error + self.l2 * item[factors]);
        }
        squares / self.batch.len() as f32
    }

    fn evaluate(&self, parameters: &[&[f32]]) -> Evaluation {
        let width = self.width();
        let row =
            |table: usize, row: u32| &parameters[table][row as usize * width..(row as usize + 1) * width];
        let (low, high) = self.data.range;
        let squares = self.data.test.iter().map(|rating| {
            let predicted = self.predict(row(0, rating.user), row(1, rating.item)).clamp(low, high);
            f64::from(predicted - rating.value).powi(2)
        });
        let loss = squares.sum::<f64>() / self.data.test.len() as f64;
        Evaluation { loss, metric: INFO.metric, value: loss.sqrt(), extra: Vec::new() }
    }
}
