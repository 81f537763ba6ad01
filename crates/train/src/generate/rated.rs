//! Ratings drawn from a model of low rank that is known.

use crate::data::Rating;
use paramill_core::prng::Prng;

const USERS: u64 = 300;
const ITEMS: u64 = 400;
const RANK: usize = 4;
const MEAN: f64 = 3.5;
const NOISE: f64 = 0.3;

/// Made ratings and how well they can be predicted.
#[derive(Debug, Clone)]
pub struct MadeRatings {
    /// To train on.
    pub train: Vec<Rating>,
    /// Held out: a quarter as many.
    pub test: Vec<Rating>,
    /// The error of the true model on the held-out ratings: what no trained model can be expected to pass.
    pub best_rmse: f64,
}

/// Draws `count` ratings to train on: mean, bias of user and item, product of their vectors, and noise.
pub fn ratings(seed: u64, count: usize) -> MadeRatings {
    let mut prng = Prng::fork(seed, 0x5a7e5);
    let mut side = |rows: u64| -> Vec<[f64; RANK + 1]> {
        (0..rows)
            .map(|_| std::array::from_fn(|column| prng.normal() * if column < RANK { 0.5 } else { 0.3 }))
            .collect()
    };
    let (users, items) = (side(USERS), side(ITEMS));
    let mut draw = |count: usize| -> (Vec<Rating>, f64) {
        let mut squares = 0.0;
        let drawn = (0..count).map(|_| {
            let (user, item) = (prng.below(USERS) as usize, prng.below(ITEMS) as usize);
            let (u, i) = (&users[user], &items[item]);
            let noise = NOISE * prng.normal();
            squares += noise * noise;
            let product: f64 = u[..RANK].iter().zip(i).map(|(u, i)| u * i).sum();
            let value = MEAN + u[RANK] + i[RANK] + product + noise;
            Rating { user: user as u32, item: item as u32, value: value as f32 }
        });
        (drawn.collect(), (squares / count as f64).sqrt())
    };
    let (train, _) = draw(count);
    let (test, best_rmse) = draw((count / 4).max(1));
    MadeRatings { train, test, best_rmse }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_ratings_and_their_spread_is_mostly_explained() {
        let made = ratings(1, 4000);
        assert_eq!(made.train, ratings(1, 4000).train);
        assert_ne!(made.train, ratings(2, 4000).train);
        assert!((made.best_rmse - NOISE).abs() < 0.03, "{}", made.best_rmse);
        let variance = made.test.iter().map(|r| (f64::from(r.value) - MEAN).powi(2)).sum::<f64>() / 1000.0;
        assert!(variance.sqrt() > 2.0 * NOISE, "{variance}");
    }
}
