//! Gradients that wait for their round to close.

use crate::absence::{Absent, AbsentFromSums};
use crate::codec::Content;
use crate::intake::GradientFrame;
use crate::kernels::Values;
use crate::optimizer::Gradient;
use crate::store::Buffer;
use crate::table::Layout;
use crate::types::{Clock, WorkerId};
use std::collections::BTreeMap;
use std::ops::Range;

/// A gradient of one unit, or a sum of some.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnitGradient<'a> {
    pub(super) unit: usize,
    /// The unit's first element on this shard.
    pub(super) start: usize,
    pub(super) values: Content<'a>,
    /// Elements that it does not have: zeros in `values`.
    pub(super) absent: &'a Absent,
    /// How many gradients it is the sum of.
    pub(super) weight: u32,
}

impl<'a> UnitGradient<'a> {
    /// Calls `visit` with the gradient of every unit in a frame.
    pub(super) fn for_each(gradient: GradientFrame<'a>, mut visit: impl FnMut(UnitGradient<'a>)) {
        match gradient {
            GradientFrame::Dense { index, start, values, absent } => {
                visit(UnitGradient { unit: index, start, values, absent, weight: 1 });
            }
            GradientFrame::Rows { start, rows, width, values, .. } => {
                for (place, row) in rows.iter().enumerate() {
                    let unit = start / width + *row as usize;
                    let values = values.slice(place * width..(place + 1) * width).into();
                    let absent = Absent::NOTHING;
                    visit(UnitGradient { unit, start: unit * width, values, absent, weight: 1 });
                }
            }
        }
    }
}

/// One worker's gradient, kept whole: for ranked addition, or until its norm is known.
#[derive(Debug, Default)]
pub(super) struct Staged {
    ranges: Vec<StagedUnit>,
}

/// The gradient of one unit.
#[derive(Debug)]
pub(super) struct StagedUnit {
    pub(super) unit: usize,
    pub(super) start: usize,
    pub(super) values: Vec<f32>,
    pub(super) absent: Absent,
}

impl Staged {
    pub(super) fn keep(&mut self, gradient: GradientFrame<'_>) {
        UnitGradient::for_each(gradient, |UnitGradient { unit, start, values, absent, .. }| {
            let (values, absent) = (values.to_vec(), absent.clone());
            self.ranges.push(StagedUnit { unit, start, values, absent });
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn units(&self) -> impl Iterator<Item = &StagedUnit> {
        self.ranges.iter()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let unit = |unit: &StagedUnit| unit.values.len() * 4 + unit.absent.memory_bytes() + 64;
        self.ranges.iter().map(unit).sum()
    }
}

/// Arrays that sums of chunks are made in, for all dense tables of a shard. The one that was given back last is taken
/// first: it is still in the cache.
#[derive(Debug, Default)]
pub(super) struct Accumulators {
    /// Those for up to 2^n elements.
    free: Vec<Vec<Buffer>>,
}

impl Accumulators {
    fn take(&mut self, elements: usize) -> Buffer {
        let elements = elements.next_power_of_two();
        let free = self.free.get_mut(elements.ilog2() as usize).and_then(Vec::pop);
        free.unwrap_or_else(|| Buffer::zeroed(elements))
    }

    fn give_back(&mut self, accumulator: Option<Buffer>) {
        let Some(accumulator) = accumulator else { return };
        let class = accumulator.len().ilog2() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(accumulator);
    }

    /// Calls `visit` with a value for every entry. Where only some are there, the others are filled in on an accumulator.
    pub(super) fn with_whole(&mut self, content: Content<'_>, visit: impl FnOnce(Values<'_>)) {
        let Content::Whole(values) = content else {
            let mut whole = self.take(content.len());
            let values = &mut whole.as_mut_slice()[..content.len()];
            content.copy_to(values);
            visit(Values::F32(values));
            return self.give_back(Some(whole));
        };
        visit(values);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.free.iter().flatten().map(Buffer::memory_bytes).sum()
    }
}

/// Where sums are.
#[derive(Debug)]
enum Sums {
    /// Rows are many and short: they lie side by side. Empty until a gradient has to be kept.
    Rows(Buffer),
    /// Each chunk has an accumulator as long as there is a sum in it.
    Chunks(Vec<Option<Buffer>>),
}

/// What a round has of one unit: how many gradients, and where they are.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Unit(u32);

impl Unit {
    /// There is a sum that waits for a step.
    const SUMMED: u32 = 1 << 31;
    /// Everything that was here is stepped.
    const STEPPED: u32 = 1 << 30;
    /// Who claims to bring more gradients than there can be does not get at the flags.
    const MAX_COUNT: u32 = Unit::STEPPED - 1;

    fn count(self) -> u32 {
        self.0 & !(Unit::SUMMED | Unit::STEPPED)
    }

    fn has(self, flag: u32) -> bool {
        self.0 & flag != 0
    }
}

/// The sum of one round's gradients on one shard's part of a table.
///
/// Contributions are counted per unit (a row of a sparse table, a chunk of a dense one), so that a worker that dies
/// in the middle of a push leaves every unit with a sum and the number of gradients in it. A unit that has all its
/// gradients may be stepped before the round closes; the last of them is then never stored.
#[derive(Debug)]
pub(super) struct Round {
    elements: usize,
    sums: Sums,
    units: Vec<Unit>,
    /// Units with a contribution, in the order they got their first: closing costs what was touched.
    touched: Vec<u32>,
    staged: BTreeMap<WorkerId, Staged>,
    /// What the sums lack.
    absent: AbsentFromSums,
    /// Whether every gradient in here is of a worker that is still there, and each worker's only one for its unit.
    regular: bool,
}

impl Round {
    fn new(layout: &Layout) -> Round {
        let units = layout.units();
        Round {
            elements: layout.elements(),
            sums: if layout.is_sparse() {
                Sums::Rows(Buffer::zeroed(0))
            } else {
                Sums::Chunks(vec![None; units])
            },
            units: vec![Unit::default(); units],
            touched: Vec::with_capacity(units),
            staged: BTreeMap::new(),
            absent: AbsentFromSums::default(),
            regular: true,
        }
    }

    /// Adds gradients of a unit. The first one is copied: nothing has to be zeroed.
    pub(super) fn add(&mut self, gradient: UnitGradient<'_>, accumulators: &mut Accumulators) {
        let is_first = !self.units[gradient.unit].has(Unit::SUMMED);
        self.put(gradient, accumulators);
        self.absent.add(gradient.unit, is_first, gradient.absent);
        self.count(gradient.unit, gradient.weight, Unit::SUMMED);
    }

    fn put(&mut self, gradient: UnitGradient<'_>, accumulators: &mut Accumulators) {
        let UnitGradient { unit, start, values, .. } = gradient;
        let sum = match &mut self.sums {
            Sums::Rows(sums) => {
                if sums.len() < self.elements {
                    *sums = Buffer::zeroed(self.elements);
                }
                &mut sums.as_mut_slice()[start..start + values.len()]
            }
            Sums::Chunks(sums) => {
                let sum = sums[unit].get_or_insert_with(|| accumulators.take(values.len()));
                &mut sum.as_mut_slice()[..values.len()]
            }
        };
        match self.units[unit].has(Unit::SUMMED) {
            true => values.add_to(sum),
            false => values.copy_to(sum),
        }
    }

    /// Whether so many more gradients make this unit complete, with `n` workers that push each unit once.
    pub(super) fn is_completed_by(&self, unit: usize, weight: u32, n: u32) -> bool {
        self.regular && self.units[unit].count() + weight == n
    }

    /// Gradients of a unit so far.
    pub(super) fn contributions(&self, unit: usize) -> u32 {
        self.units[unit].count()
    }

    /// The unit's last gradients are here, and `step` is called with all of them, and with what is absent from all. Those
    /// that have a value for every element are not stored; of others only the entries that are there are added to the sum
    /// before.
    pub(super) fn finish(
        &mut self,
        last: UnitGradient<'_>,
        accumulators: &mut Accumulators,
        step: impl FnOnce(Gradient<'_>, &Absent),
    ) {
        let UnitGradient { unit, start, values, weight, .. } = last;
        let range = start..start + values.len();
        let was_summed = self.units[unit].has(Unit::SUMMED);
        self.absent.add(unit, !was_summed, last.absent);
        let absent = self.absent.take(unit);
        match values {
            Content::Whole(last) => {
                let before = was_summed.then(|| self.sum(unit, range));
                step(Gradient { before, last }, &absent);
            }
            Content::Sparse(_) => {
                self.put(last, accumulators);
                step(self.sum(unit, range).into(), &absent);
            }
        }
        self.count(unit, weight, Unit::STEPPED);
        if let Sums::Chunks(sums) = &mut self.sums {
            accumulators.give_back(sums[unit].take());
        }
    }

    fn count(&mut self, unit: usize, weight: u32, flag: u32) {
        let of_unit = &mut self.units[unit];
        if *of_unit == Unit::default() {
            self.touched.push(unit as u32);
        }
        *of_unit = Unit((of_unit.count() + weight).min(Unit::MAX_COUNT) | flag);
    }

    /// Whether everything that this round has of a unit is in the parameters.
    pub(super) fn is_stepped(&self, unit: usize) -> bool {
        self.units[unit].has(Unit::STEPPED)
    }

    /// Some worker may come again, or not come any more: counts alone do not tell any longer when a unit is complete.
    pub(super) fn disturb(&mut self) {
        self.regular = false;
    }

    /// Another model may add to what is stepped already. That is then another step, of the same round.
    pub(super) fn reopen(&mut self) {
        self.disturb();
        for &unit in &self.touched {
            self.units[unit as usize].0 &= !Unit::STEPPED;
        }
    }

    /// Keeps a worker's whole gradient under its rank instead of adding it.
    pub(super) fn stage(&mut self, worker: WorkerId, gradient: Staged) {
        // PSP lets one worker contribute to a round with several clocks.
        self.staged.entry(worker).or_default().ranges.extend(gradient.ranges);
    }

    /// Adds the staged gradients up, by rank.
    pub(super) fn add_staged(&mut self, accumulators: &mut Accumulators) {
        for (_, staged) in std::mem::take(&mut self.staged) {
            for StagedUnit { unit, start, values, absent } in &staged.ranges {
                let values = Values::F32(values).into();
                let gradient = UnitGradient { unit: *unit, start: *start, values, absent, weight: 1 };
                self.add(gradient, accumulators);
            }
        }
    }

    /// Units with a sum that waits for a step, and how many gradients they got.
    pub(super) fn summed(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let units = self.touched.iter().map(|&unit| (unit as usize, self.units[unit as usize]));
        units.filter(|(_, of_unit)| of_unit.has(Unit::SUMMED)).map(|(unit, of_unit)| (unit, of_unit.count()))
    }

    /// The sum of a unit's gradients, which is over this range of elements.
    pub(super) fn sum(&self, unit: usize, range: Range<usize>) -> &[f32] {
        match &self.sums {
            Sums::Rows(sums) => &sums.as_slice()[range],
            Sums::Chunks(sums) => {
                let sum = sums[unit].as_ref().expect("a unit that is summed has an accumulator");
                &sum.as_slice()[..range.len()]
            }
        }
    }

    /// What is absent from all gradients of a unit.
    pub(super) fn absent(&self, unit: usize) -> &Absent {
        self.absent.of(unit)
    }

    /// Makes the round empty again, keeping its memory.
    fn clear(&mut self, accumulators: &mut Accumulators) {
        for unit in self.touched.drain(..) {
            self.units[unit as usize] = Unit::default();
            if let Sums::Chunks(sums) = &mut self.sums {
                accumulators.give_back(sums[unit as usize].take());
            }
        }
        self.staged.clear();
        self.absent.clear();
        self.regular = true;
    }

    fn memory_bytes(&self) -> usize {
        let staged: usize = self.staged.values().map(Staged::memory_bytes).sum();
        let sums = match &self.sums {
            Sums::Rows(sums) => sums.memory_bytes(),
            Sums::Chunks(sums) => sums.iter().flatten().map(Buffer::memory_bytes).sum(),
        };
        sums + self.units.len() * 8 + staged + self.absent.memory_bytes()
    }
}

/// The rounds of a table that are not closed, and the memory of one that was. There are few at a time.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// Ascending.
    open: Vec<(Clock, Round)>,
    spare: Option<Round>,
}

impl Rounds {
    /// The round of a clock, with memory of an earlier one where there is some.
    pub(super) fn open(&mut self, clock: Clock, layout: &Layout) -> &mut Round {
        let at = self.open.partition_point(|(known, _)| *known < clock);
        if self.open.get(at).is_none_or(|(known, _)| *known != clock) {
            let round = self.spare.take().unwrap_or_else(|| Round::new(layout));
            self.open.insert(at, (clock, round));
        }
        &mut self.open[at].1
    }

    /// The round of a clock, if it has begun.
    pub(super) fn get(&self, clock: Clock) -> Option<&Round> {
        self.open.iter().find(|(known, _)| *known == clock).map(|(_, round)| round)
    }

    /// All that have begun, by clock.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Round> {
        self.open.iter_mut().map(|(_, round)| round)
    }

    /// Takes a round out.
    pub(super) fn take(&mut self, clock: Clock) -> Option<Round> {
        let at = self.open.iter().position(|(known, _)| *known == clock)?;
        Some(self.open.remove(at).1)
    }

    /// Takes out the earliest round.
    pub(super) fn take_first(&mut self) -> Option<(Clock, Round)> {
        (!self.open.is_empty()).then(|| self.open.remove(0))
    }

    /// Keeps the memory of a round that is over for the next one.
    pub(super) fn keep(&mut self, mut round: Round, accumulators: &mut Accumulators) {
        round.clear(accumulators);
        self.spare.get_or_insert(round);
    }

    /// Drops the rounds before `version`.
    pub(super) fn drop_before(&mut self, version: Clock, accumulators: &mut Accumulators) {
        while self.open.first().is_some_and(|(clock, _)| *clock < version)
            && let Some((_, round)) = self.take_first()
        {
            self.keep(round, accumulators);
        }
    }

    /// How many have begun.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let open = self.open.iter().map(|(_, round)| round);
        open.chain(&self.spare).map(Round::memory_bytes).sum()
    }
}
