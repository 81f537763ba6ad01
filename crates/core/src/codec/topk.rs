//! The largest entries: exactly so many, or about so many by the threshold of a sample.

use super::{Bound, Context, Mask, Sparsifier, Stage, require_ratio, share};
use crate::prng::uniform_at;
use crate::registry::{Entry, Param};
use serde::Deserialize;

pub(super) const ENTRY: Entry<Stage> = Entry {
    name: "topk",
    about: "The largest entries of each chunk travel; the rest is kept and added to the next.",
    params: &[
        Param { name: "ratio", default: None, about: "The part of a chunk's entries that travels." },
        Param {
            name: "select",
            default: Some("exact"),
            about: "`exact`, or `sampled`: about so many, by the threshold of a sample; faster.",
        },
        Param {
            name: "residual",
            default: Some("true"),
            about: "Keep the rest; without it the rest is lost.",
        },
    ],
    example: "topk:0.01",
    build: |spec| {
        let spec = spec.with_positional("ratio")?;
        let config: TopK = spec.config()?;
        require_ratio(&spec, config.ratio)?;
        Ok(Box::new(Stage::Sparsifier(Box::new(config))))
    },
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopK {
    ratio: f64,
    #[serde(default)]
    select: Select,
    #[serde(default = "yes")]
    residual: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Select {
    #[default]
    Exact,
    Sampled,
}

fn yes() -> bool {
    true
}

impl Sparsifier for TopK {
    fn select(&self, context: &Context<'_>, values: &[f32], mask: &mut Mask) {
        let count = share(self.ratio, values.len());
        match self.select {
            Select::Exact => select_largest(values, count, mask),
            Select::Sampled => select_about(values, count, context.seed, mask),
        }
    }

    fn bound(&self, count: usize) -> Bound {
        let kept = share(self.ratio, count) as f64 / count.max(1) as f64;
        match self.select {
            // The entries that stay are the smallest, so they have at most their share of the squares.
            Select::Exact => Bound { of_norm: (1.0 - kept).sqrt() * 1.0001, absolute: 0.0 },
            Select::Sampled => Bound { of_norm: 1.0, absolute: 0.0 },
        }
    }

    fn keeps_residual(&self) -> bool {
        self.residual
    }
}

const MAGNITUDE: u32 = 0x7fff_ffff;
/// Values that a threshold is guessed from.
const SAMPLE: usize = PLACES * RUN;
/// They lie at so many places, a run of values at each: to go somewhere costs more than to read on.
const PLACES: usize = 64;
const RUN: usize = 8;
/// As many are kept in order while a sample is drawn; more are sorted out afterwards.
const FEW: usize = 32;
/// Below this many values all of them are looked at.
const SMALL: usize = 4 * SAMPLE;

/// Marks the `count` entries with the largest magnitudes; of equal ones those that come first. Zeros are never marked.
pub(super) fn select_largest(values: &[f32], count: usize, mask: &mut Mask) {
    if count == 0 {
        return;
    }
    // A guess that is a bit too low leaves few candidates, among which the exact threshold is found.
    let guess = (values.len() > SMALL).then(|| sampled_threshold(values, 2 * count, 0));
    mask.select_above(values, guess.unwrap_or(0.0));
    let mut candidates = Vec::new();
    mask.gather(values, &mut candidates);
    if candidates.len() < count && guess.is_some_and(|guess| guess > 0.0) {
        mask.select_above(values, 0.0);
        mask.gather(values, &mut candidates);
    }
    if candidates.len() <= count {
        return;
    }
    let mut magnitudes: Vec<u32> = candidates.iter().map(|value| value.to_bits() & MAGNITUDE).collect();
    let (_, &mut smallest, _) = magnitudes.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    // Candidates are above zero, so there is a magnitude below.
    mask.select_above(values, f32::from_bits(smallest - 1));
    let mut excess = mask.count() - count;
    for at in (0..values.len()).rev() {
        if excess == 0 {
            break;
        }
        if values[at].to_bits() & MAGNITUDE == smallest {
            mask.unset(at);
            excess -= 1;
        }
    }
}

/// Marks the entries above the threshold that `count` entries of the values are likely to be above.
pub(super) fn select_about(values: &[f32], count: usize, seed: u64, mask: &mut Mask) {
    if values.len() > SMALL {
        mask.select_above(values, sampled_threshold(values, count, seed))
    } else {
        select_largest(values, count, mask)
    }
}

/// The magnitude that about `count` of the values are above, guessed from some of them.
fn sampled_threshold(values: &[f32], count: usize, seed: u64) -> f32 {
    // A few values of each of many places, so that no period in the values misleads.
    let (stride, seed) = (values.len() / PLACES, seed as u32 ^ (seed >> 32) as u32);
    let sample = (0..PLACES).flat_map(|place| {
        let within = uniform_at(seed, place as u32) * (stride - RUN + 1) as f32;
        let start = place * stride + (within as usize).min(stride - RUN);
        values[start..start + RUN].iter().map(|value| value.to_bits() & MAGNITUDE)
    });
    let rank = (count as f64 / values.len() as f64 * SAMPLE as f64).round() as usize;
    let rank = rank.clamp(1, SAMPLE);
    if rank > FEW {
        let mut sample: Vec<u32> = sample.collect();
        let (_, &mut threshold, _) = sample.select_nth_unstable_by(rank - 1, |a, b| b.cmp(a));
        return f32::from_bits(threshold);
    }
    // Where few are wanted, hardly any value of the sample gets in between them.
    let mut largest = [0u32; FEW];
    let largest = &mut largest[..rank];
    for new in sample {
        if new > largest[rank - 1] {
            let place = largest.partition_point(|known| *known >= new);
            largest.copy_within(place..rank - 1, place + 1);
            largest[place] = new;
        }
    }
    f32::from_bits(largest[rank - 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;
    use proptest::prelude::*;

    /// By sorting everything.
    fn twin(values: &[f32], count: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..values.len()).collect();
        places.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()).then(a.cmp(&b)));
        places.truncate(count);
        places.retain(|&at| values[at] != 0.0);
        places.sort_unstable();
        places
    }

    proptest! {
        #[test]
        fn exactly_the_largest_are_selected(
            seed: u64,
            len in prop_oneof![1usize..300, 3000usize..20000],
            ratio in prop_oneof![0.0001f64..0.05, 0.05f64..1.0],
            distinct in prop_oneof![Just(3u64), Just(1000u64), Just(1u64 << 40)],
        ) {
            let mut prng = Prng::new(seed);
            let values: Vec<f32> =
                (0..len).map(|_| prng.below(distinct) as f32 - (distinct / 2) as f32).collect();
            let (count, mut mask) = (share(ratio, len), Mask::default());
            mask.reset(len);
            select_largest(&values, count, &mut mask);
            let mut places = Vec::new();
            mask.for_each(|at| places.push(at));
            prop_assert_eq!(places, twin(&values, count));
        }
    }

    #[test]
    fn a_sample_selects_about_as_many() {
        let mut prng = Prng::new(5);
        let mut selected = 0;
        for seed in 0..100 {
            let values: Vec<f32> = (0..8192).map(|_| prng.normal() as f32).collect();
            let mut mask = Mask::default();
            select_about(&values, 82, seed, &mut mask);
            selected += mask.count();
        }
        assert!((60..130).contains(&(selected / 100)), "{selected}");
    }
}
