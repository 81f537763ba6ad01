//! Values that an exchange moves. Without a codec nothing looks at them, and the simplest do. Codecs are given values like
//! those of training: what a sparsifier selects, a quantiser rounds and a compressor finds depends on them.

use super::plan::Exchange;
use paramill_core::prng::Prng;

const INITIAL: f32 = 0.5;
const SEED: u64 = 1;
/// Normal values that are drawn once and copied from: drawing anew would take longer than the exchange.
const DRAWN: usize = 1 << 18;
/// The longest run that is copied from them at once.
const RUN: usize = DRAWN / 4;
/// Of a gradient, one part of so many is drawn anew before each iteration. Gradients of successive steps resemble each other,
/// and the copy costs little beside the exchange.
const PARTS: usize = 16;
/// Standard deviation of parameters. Gradients have 1.
const PARAMETER_DEVIATION: f32 = 0.05;

/// What a worker sends, and what parameters begin with.
pub(super) enum Values {
    /// Numbers of one sign, so that parameters move, and small ones, so that they stay finite.
    Plain { rank: u32 },
    /// Normal values that change from iteration to iteration.
    Normal(Normal),
}

pub(super) struct Normal {
    drawn: Vec<f32>,
    places: Prng,
    /// Which part of each gradient is drawn anew next.
    part: usize,
}

impl Values {
    pub(super) fn new(exchange: &Exchange, rank: u32) -> Values {
        if exchange.has_codec() { Values::Normal(Normal::new(rank)) } else { Values::Plain { rank } }
    }

    /// The parameters of a table at first; all workers have the same.
    pub(super) fn initial(&self, elements: usize) -> Vec<f32> {
        let mut values = vec![INITIAL; elements];
        if let Values::Normal(normal) = self {
            // The drawn values are the same in all workers; only the places where gradients take them differ.
            for run in values.chunks_mut(DRAWN) {
                run.iter_mut()
                    .zip(&normal.drawn)
                    .for_each(|(value, drawn)| *value = PARAMETER_DEVIATION * drawn);
            }
        }
        values
    }

    /// A gradient.
    pub(super) fn fill(&mut self, gradient: &mut [f32]) {
        match self {
            Values::Plain { rank } => {
                for (index, value) in gradient.iter_mut().enumerate() {
                    *value = 0.001 * (1 + index % 7) as f32 * (*rank % 3 + 1) as f32;
                }
            }
            Values::Normal(normal) => normal.fill(gradient),
        }
    }

    /// Changes gradients for the next iteration; returns false where nothing looks at them and they stay.
    pub(super) fn vary<'a>(&mut self, gradients: impl Iterator<Item = &'a mut [f32]>) -> bool {
        let Values::Normal(normal) = self else { return false };
        for gradient in gradients {
            let (start, end) =
                (gradient.len() * normal.part / PARTS, gradient.len() * (normal.part + 1) / PARTS);
            normal.fill(&mut gradient[start..end]);
        }
        normal.part = (normal.part + 1) % PARTS;
        true
    }

    /// Whether a parameter with this value at the end was part of an exchange. Sparsifiers let most parameters stay as they
    /// were in a few iterations.
    pub(super) fn has_moved(&self, value: f32) -> bool {
        value.is_finite() && (matches!(self, Values::Normal(_)) || value != INITIAL)
    }
}

impl Normal {
    fn new(rank: u32) -> Normal {
        let mut prng = Prng::new(SEED);
        let drawn = (0..DRAWN).map(|_| prng.normal() as f32).collect();
        Normal { drawn, places: Prng::fork(SEED, u64::from(rank) + 1), part: 0 }
    }

    fn fill(&mut self, gradient: &mut [f32]) {
        for run in gradient.chunks_mut(RUN) {
            let start = self.places.below((DRAWN - run.len()) as u64) as usize;
            run.copy_from_slice(&self.drawn[start..start + run.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deviation(values: &[f32]) -> f64 {
        (values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn gradients_of_a_codec_are_normal_differ_between_workers_and_change() {
        let (mut first, mut second) = (Values::Normal(Normal::new(0)), Values::Normal(Normal::new(1)));
        let (mut mine, mut theirs) = (vec![0.0; 3 * RUN + 17], vec![0.0; 3 * RUN + 17]);
        first.fill(&mut mine);
        second.fill(&mut theirs);
        assert_ne!(mine, theirs);
        assert!((deviation(&mine) - 1.0).abs() < 0.01);
        let before = mine.clone();
        for part in 1..=PARTS {
            assert!(first.vary([&mut mine[..]].into_iter()));
            let same = mine.iter().zip(&before).filter(|(now, before)| now == before).count();
            let untouched = before.len() - before.len() * part / PARTS;
            assert!((untouched..untouched + before.len() / 1000).contains(&same), "{same} of {untouched}");
        }
        assert!((deviation(&mine) - 1.0).abs() < 0.01);
    }

    #[test]
    fn parameters_begin_alike_for_all_workers_and_vary_over_a_table() {
        let (first, second) = (Values::Normal(Normal::new(0)), Values::Normal(Normal::new(1)));
        let initial = first.initial(2 * DRAWN + 5);
        assert_eq!(initial, second.initial(2 * DRAWN + 5));
        assert!((deviation(&initial) - f64::from(PARAMETER_DEVIATION)).abs() < 0.001);
    }

    #[test]
    fn without_a_codec_a_parameter_that_stays_was_not_exchanged() {
        let mut plain = Values::Plain { rank: 0 };
        assert!(!plain.vary(std::iter::empty()));
        assert_eq!(plain.initial(2), [INITIAL, INITIAL]);
        assert!(!plain.has_moved(INITIAL) && plain.has_moved(0.4) && !plain.has_moved(f32::NAN));
    }
}
