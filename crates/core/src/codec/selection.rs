//! Which entries of a layer travel: the largest ones, exactly so many, or about so many by the threshold of a sample.

use super::Mask;
use crate::hands::{self, Hands};
use crate::prng::uniform_at;
use std::ops::Range;

const MAGNITUDE: u32 = 0x7fff_ffff;
/// Values of a sample that lie next to each other: to go somewhere costs more than to read on.
const RUN: usize = 8;
/// Elements that are read on in the time that it takes to go somewhere.
const PLACE_COST: usize = 64;
/// The fewest and the most values that a first guess is made from.
const GUESS: Range<usize> = 512..1 << 16;
/// A guess is of use where it leaves less than this part of the values.
const FEW: usize = 8;
/// Bits that one pass of the search finds out. Magnitudes have 31.
const DIGITS: [u32; 3] = [11, 10, 10];

/// Values that are read stretch by stretch, as often as one likes, by several hands. One method is required.
pub trait Stretches: Sync {
    /// Calls `each` with the values of a range, in order and in stretches of any length, and the place of their first one.
    /// MUST give the same values every time.
    fn visit(&self, range: Range<usize>, each: &mut dyn FnMut(usize, &[f32]));
}

/// Values in memory.
impl Stretches for &[f32] {
    fn visit(&self, range: Range<usize>, each: &mut dyn FnMut(usize, &[f32])) {
        each(range.start, &self[range]);
    }
}

/// How many of a layer's entries travel: those with the largest magnitudes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// As many, and no more.
    pub count: usize,
    /// About as many, by the threshold of this part of the entries.
    pub sample: Option<f64>,
}

/// The entries of a layer that travel: those above a threshold, and of those that are equal to it the ones that come first.
/// Zeros never do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    elements: Range<usize>,
    /// The magnitude that they are above. As integers, magnitudes are ordered like the numbers they stand for.
    above: u32,
    /// Entries before this one travel also if they are equal to the threshold.
    ties_end: usize,
}

impl Selection {
    /// The entries of `elements` that are among their largest.
    pub fn find(
        values: &dyn Stretches,
        elements: Range<usize>,
        largest: Largest,
        seed: u64,
        hands: &dyn Hands,
    ) -> Selection {
        let Largest { count, sample } = largest;
        let len = elements.len();
        if count == 0 {
            return Selection { ties_end: elements.start, elements, above: MAGNITUDE };
        }
        if count >= len {
            return Selection { ties_end: elements.start, elements, above: 0 };
        }
        let sampled = sample.map(|part| ((part * len as f64).ceil() as usize).max(GUESS.start));
        match sampled.filter(|&size| size < len) {
            Some(size) => {
                let mut drawn = draw(values, elements.clone(), size, seed, hands);
                let rank = (count as f64 / len as f64 * drawn.len() as f64).round() as usize;
                let above = nth_largest(&mut drawn, rank.max(1));
                Selection { ties_end: elements.start, elements, above }
            }
            None => Selection::exact(values, elements, count, hands),
        }
    }

    fn exact(values: &dyn Stretches, elements: Range<usize>, count: usize, hands: &dyn Hands) -> Selection {
        let found = by_guess(values, elements.clone(), count, hands)
            .unwrap_or_else(|| by_digits(values, elements.clone(), count, hands));
        if found.smallest == 0 {
            return Selection { ties_end: elements.start, elements, above: 0 };
        }
        let ties_end = match found.ties == found.all_ties {
            true => elements.end,
            false => end_of_ties(values, elements.clone(), &found, hands),
        };
        Selection { elements, above: found.smallest, ties_end }
    }

    /// The layer's elements.
    pub(super) fn elements(&self) -> &Range<usize> {
        &self.elements
    }

    /// Marks its entries among those of a stretch that begins at `start`.
    pub(super) fn mark(&self, start: usize, values: &[f32], mask: &mut Mask) {
        let first = self.elements.start.max(start) - start;
        let end = self.elements.end.min(start + values.len()) - start;
        let ties = self.ties_end.clamp(start + first, start + end) - start;
        // All that are equal to the threshold travel: so do those above the magnitude below it.
        let (whole, rest) = if ties == end { (end, end) } else { (first, ties) };
        let below = self.above.saturating_sub(1);
        mask.mark_above(first, &values[first..whole], f32::from_bits(below));
        mask.mark_above(whole, &values[whole..end], f32::from_bits(self.above));
        for (at, value) in values.iter().enumerate().take(rest).skip(whole) {
            if value.to_bits() & MAGNITUDE == self.above {
                mask.set(at);
            }
        }
    }
}

/// The smallest magnitude among the largest ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    smallest: u32,
    /// How many of the largest have it.
    ties: usize,
    /// How many have it at all.
    all_ties: usize,
}

/// Looks among the values that are above a guess, which is likely to be a bit too low. `None` where it is too high, or leaves
/// too many.
fn by_guess(
    values: &dyn Stretches,
    elements: Range<usize>,
    count: usize,
    hands: &dyn Hands,
) -> Option<Found> {
    let len = elements.len();
    if len / FEW <= count {
        return None;
    }
    let mut guess = 0;
    if len > 4 * GUESS.start {
        let size = (len / 32).clamp(GUESS.start, GUESS.end);
        let mut drawn = draw(values, elements.clone(), size, 0, hands);
        let share = count as f64 / len as f64 * drawn.len() as f64;
        // Four deviations of a sample's count, and a few: neighbours are alike.
        let rank = (share + 4.0 * share.sqrt() + 4.0) as usize;
        if rank > drawn.len() / FEW {
            return None;
        }
        guess = nth_largest(&mut drawn, rank);
    }
    let above = hands::share_out(hands, hands::cut(hands, elements), |piece| {
        let (mut mask, mut stretch, mut above) = (Mask::default(), Vec::new(), Vec::new());
        values.visit(piece, &mut |_, values| {
            mask.select_above(values, f32::from_bits(guess));
            mask.gather(values, &mut stretch);
            above.extend(stretch.iter().map(|value| value.to_bits() & MAGNITUDE));
        });
        above
    });
    let mut above = in_one(above);
    if above.len() < count {
        // Not even all that are not zero are so many.
        return (guess == 0).then_some(Found { smallest: 0, ties: 0, all_ties: 0 });
    }
    let smallest = nth_largest(&mut above, count);
    let larger = above.iter().filter(|&&magnitude| magnitude > smallest).count();
    let all_ties = above.iter().filter(|&&magnitude| magnitude == smallest).count();
    Some(Found { smallest, ties: count - larger, all_ties })
}

/// Finds the magnitude digit by digit, from the highest: three passes over the values, and no memory of theirs.
fn by_digits(values: &dyn Stretches, elements: Range<usize>, count: usize, hands: &dyn Hands) -> Found {
    let (mut found, mut known, mut left, mut ties) = (0u32, 0u32, count, 0);
    let mut shift = 31;
    for bits in DIGITS {
        shift -= bits;
        let digit = (1u32 << bits) - 1;
        let counted = hands::share_out(hands, hands::cut(hands, elements.clone()), |piece| {
            let mut counts = vec![0usize; 1 << bits];
            values.visit(piece, &mut |_, values| {
                for value in values {
                    let magnitude = value.to_bits() & MAGNITUDE;
                    // Without a branch: most values belong to no digit that is looked for, or all do.
                    counts[(magnitude >> shift & digit) as usize] += usize::from(magnitude & known == found);
                }
            });
            counts
        });
        let count_of = |candidate: usize| counted.iter().map(|counts| counts[candidate]).sum::<usize>();
        for (candidate, here) in (0..1usize << bits).map(|candidate| (candidate, count_of(candidate))).rev() {
            if here >= left {
                found |= (candidate as u32) << shift;
                ties = here;
                break;
            }
            left -= here;
        }
        known |= digit << shift;
    }
    Found { smallest: found, ties: left, all_ties: ties }
}

/// The place behind the last of the entries that are equal to the threshold and travel.
fn end_of_ties(values: &dyn Stretches, elements: Range<usize>, found: &Found, hands: &dyn Hands) -> usize {
    let (mut left, mut end) = (found.ties, elements.start);
    let pieces = hands::cut(hands, elements);
    let ties = hands::share_out(hands, pieces.clone(), |piece| {
        let mut ties = 0;
        values.visit(piece, &mut |_, values| {
            ties += values.iter().filter(|value| value.to_bits() & MAGNITUDE == found.smallest).count();
        });
        ties
    });
    // The last of them is in the first piece that has as many as are left.
    let mut last = None;
    for (piece, ties) in pieces.into_iter().zip(ties) {
        if ties >= left {
            last = Some(piece);
            break;
        }
        left -= ties;
    }
    let Some(last) = last else { return end };
    values.visit(last, &mut |start, values| {
        if left == 0 {
            return;
        }
        for (at, value) in (start..).zip(values) {
            if value.to_bits() & MAGNITUDE == found.smallest {
                left -= 1;
                end = at + 1;
                if left == 0 {
                    return;
                }
            }
        }
    });
    end
}

fn in_one(mut parts: Vec<Vec<u32>>) -> Vec<u32> {
    if parts.len() == 1 { parts.swap_remove(0) } else { parts.concat() }
}

/// Magnitudes of about `size` of the values: a few of each of many places, so that no period in them misleads.
fn draw(
    values: &dyn Stretches,
    elements: Range<usize>,
    size: usize,
    seed: u64,
    hands: &dyn Hands,
) -> Vec<u32> {
    let run = RUN.min(elements.len());
    let places = size.div_ceil(run).min(elements.len() / run);
    let (stride, seed) = (elements.len() / places, seed as u32 ^ (seed >> 32) as u32);
    let pieces = hands::pieces(hands, places * PLACE_COST);
    let cut = (0..pieces).map(|piece| places * piece / pieces..places * (piece + 1) / pieces);
    let drawn = hands::share_out(hands, cut.collect(), |places: Range<usize>| {
        let mut drawn = Vec::with_capacity(places.len() * run);
        for place in places {
            let within = (uniform_at(seed, place as u32) * (stride - run + 1) as f32) as usize;
            let start = elements.start + place * stride + within.min(stride - run);
            values.visit(start..start + run, &mut |_, values| {
                drawn.extend(values.iter().map(|value| value.to_bits() & MAGNITUDE));
            });
        }
        drawn
    });
    in_one(drawn)
}

/// The magnitude that so many are at least as large as.
fn nth_largest(magnitudes: &mut [u32], rank: usize) -> u32 {
    let rank = rank.min(magnitudes.len());
    *magnitudes.select_nth_unstable_by(rank - 1, |a, b| b.cmp(a)).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hands::Alone;
    use crate::prng::Prng;
    use proptest::prelude::*;

    /// By sorting everything.
    fn naive(values: &[f32], count: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..values.len()).collect();
        places.sort_by(|&a, &b| values[b].abs().total_cmp(&values[a].abs()).then(a.cmp(&b)));
        places.truncate(count);
        places.retain(|&at| values[at] != 0.0);
        places.sort_unstable();
        places
    }

    fn drawn_values(seed: u64, len: usize, distinct: u64) -> Vec<f32> {
        let mut prng = Prng::new(seed);
        (0..len).map(|_| prng.below(distinct) as f32 - (distinct / 2) as f32).collect()
    }

    fn marked(selection: &Selection, start: usize, values: &[f32]) -> Vec<usize> {
        let (mut mask, mut places) = (Mask::default(), Vec::new());
        mask.reset(values.len());
        selection.mark(start, values, &mut mask);
        mask.for_each(|at| places.push(start + at));
        places
    }

    proptest! {
        #[test]
        fn top_k_of_a_layer_picks_exactly_the_layers_largest(
            seed: u64,
            len in prop_oneof![1usize..300, 3000usize..20000],
            before in 0usize..100,
            ratio in prop_oneof![0.0001f64..0.05, 0.05f64..1.0],
            distinct in prop_oneof![Just(3u64), Just(1000u64), Just(1u64 << 40)],
            cuts in prop::collection::vec(0usize..20100, 0..6),
        ) {
            // Other layers lie before it and behind it.
            let values = drawn_values(seed, before + len + 50, distinct);
            let (layer, count) = (before..before + len, super::super::share(ratio, len));
            let largest = Largest { count, sample: None };
            let selection = Selection::find(&values.as_slice(), layer.clone(), largest, 0, &Alone);
            let expected: Vec<usize> = naive(&values[layer], count).iter().map(|at| before + at).collect();
            // Whatever the chunks, and one by one.
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| cut < values.len()).collect();
            cuts.extend([0, values.len()]);
            cuts.sort_unstable();
            let chunks = cuts.windows(2).filter(|pair| pair[0] < pair[1]);
            let found: Vec<usize> =
                chunks
                    .filter(|pair| pair[0] < before + len && pair[1] > before)
                    .flat_map(|pair| marked(&selection, pair[0], &values[pair[0]..pair[1]])).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn a_guess_and_digits_find_the_same(
            seed: u64,
            len in 3000usize..20000,
            ratio in 0.001f64..0.02,
            distinct in prop_oneof![Just(300u64), Just(1u64 << 40)],
        ) {
            let (values, count) = (drawn_values(seed, len, distinct), super::super::share(ratio, len));
            let digits = by_digits(&values.as_slice(), 0..len, count, &Alone);
            if let Some(guess) = by_guess(&values.as_slice(), 0..len, count, &Alone) {
                prop_assert_eq!(guess, digits);
            }
        }
    }

    #[test]
    fn a_guess_is_right_for_values_as_gradients_have_them() {
        let mut prng = Prng::new(5);
        let values: Vec<f32> = (0..1 << 18).map(|_| prng.normal() as f32).collect();
        for count in [1, 100, 2622] {
            assert!(by_guess(&values.as_slice(), 0..values.len(), count, &Alone).is_some(), "{count}");
        }
    }

    #[test]
    fn a_sample_selects_about_as_many() {
        let mut prng = Prng::new(5);
        for (len, part) in [(8192, 0.01), (1 << 20, 0.01), (1 << 20, 0.1)] {
            let values: Vec<f32> = (0..len).map(|_| prng.normal() as f32).collect();
            let (count, mut selected) = (len / 100, 0);
            for seed in 0..20 {
                let largest = Largest { count, sample: Some(part) };
                let selection = Selection::find(&values.as_slice(), 0..len, largest, seed, &Alone);
                selected += marked(&selection, 0, &values).len();
            }
            let mean = selected / 20;
            assert!((count * 7 / 10..count * 16 / 10).contains(&mean), "{mean} for {count} of {len}");
        }
    }
}
