//! Chains: reading their text form, and refusing those that make no sense.

use super::payload;
use super::{Bound, Bytes, Container, Context, Filter, LowRank, Quantiser, Sparsifier, Stage};
use crate::limits;
use crate::registry::Axis;
use crate::spec::{Spec, SpecError, split_outside_parentheses};
use crate::wire::DType;
use std::fmt;

/// The largest error of a quantiser, relative to the values' norm, that a product of what it made can bear.
const FINE: f64 = 0.01;

/// The kind of a stage. Stages of a chain come in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Says when the chain applies, or prepares values.
    Filter,
    /// Says which entries travel.
    Sparsifier,
    /// Sends two thin matrices.
    LowRank,
    /// Says in how many bits a value travels.
    Quantiser,
    /// Says where values stand.
    Container,
    /// Compresses bytes.
    Bytes,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Filter => "filter",
            Kind::Sparsifier => "sparsifier",
            Kind::LowRank => "low-rank codec",
            Kind::Quantiser => "quantiser",
            Kind::Container => "container",
            Kind::Bytes => "byte compressor",
        })
    }
}

/// A chain of stages, ready to encode and decode. It has no state: that is in [`super::Encoder`].
#[derive(Debug, Default)]
pub struct Codec {
    text: String,
    tag: u16,
    filters: Vec<Box<dyn Filter>>,
    pub(super) sparsifier: Option<Box<dyn Sparsifier>>,
    pub(super) low_rank: Option<Box<dyn LowRank>>,
    pub(super) quantiser: Option<Box<dyn Quantiser>>,
    /// `None` when the text names none: values without a sparsifier are stored densely.
    pub(super) container: Option<Container>,
    pub(super) bytes: Option<Box<dyn Bytes>>,
    /// The input is a sum of decoded gradients, which workers had clipped, and whose momentum they had applied.
    is_relay: bool,
}

impl Codec {
    /// Reads a chain such as `topk:0.01+f16+lz4`. A chain that makes no sense is refused with the reason.
    pub fn parse(axis: &Axis<Stage>, text: &str) -> Result<Codec, SpecError> {
        let syntax = |why: &str| SpecError::Syntax { text: text.to_owned(), why: why.to_owned() };
        let parts = split_outside_parentheses(text, '+').ok_or_else(|| syntax("parentheses do not match"))?;
        let (mut codec, mut specs) = (Codec::default(), Vec::<(Spec, Kind)>::new());
        for part in parts {
            let spec = Spec::parse(part)?;
            let stage = axis.build(&spec)?;
            let kind = stage.kind();
            if let Some((before, last)) = specs.last() {
                check_order(&spec, kind, before, *last)?;
            }
            codec.add(*stage);
            specs.push((spec, kind));
        }
        codec.check(&specs)?;
        codec.text = specs.iter().map(|(spec, _)| spec.to_string()).collect::<Vec<_>>().join("+");
        codec.tag = payload::tag(&codec.text);
        Ok(codec)
    }

    /// Reads a chain that gradients travel by, from workers to servers.
    pub fn for_pushes(axis: &Axis<Stage>, text: &str) -> Result<Codec, SpecError> {
        let codec = Codec::parse(axis, text)?;
        if codec.replaces().is_some() {
            let why = "not for gradients: it sends what has changed since the last version, and gradients have none";
            return Err(SpecError::Parameter { component: codec.text.clone(), why: why.into() });
        }
        Ok(codec)
    }

    /// Reads a chain that parameters travel by, from servers to workers.
    pub fn for_answers(axis: &Axis<Stage>, text: &str) -> Result<Codec, SpecError> {
        let codec = Codec::parse(axis, text)?;
        let refuse = |why: &str| {
            Err(SpecError::Parameter {
                component: codec.text.clone(),
                why: format!("not for answers: {why}"),
            })
        };
        if codec.momentum().is_some() || codec.low_rank.is_some() {
            return refuse("it remembers what gradients were like, and parameters are none");
        }
        if codec.changes_values() {
            return refuse("it would clip parameters");
        }
        if codec.is_random() || codec.sparsifier.as_ref().is_some_and(|sparsifier| sparsifier.is_unbiased()) {
            return refuse(
                "what it leaves out is sent with the next answer, and its random errors would add up",
            );
        }
        Ok(codec)
    }

    /// The same chain for sums of what workers encoded by it: clipping and momentum were theirs, and are not done twice.
    pub fn of_sums(mut self) -> Codec {
        self.filters.retain(|filter| !filter.changes_values());
        self.is_relay = true;
        self
    }

    /// The same chain for rows of a table: what is zero, and so not among them, stays so.
    pub fn of_rows(mut self) -> Codec {
        self.container.get_or_insert_default();
        self
    }

    fn add(&mut self, stage: Stage) {
        match stage {
            Stage::Filter(filter) => self.filters.push(filter),
            Stage::Sparsifier(sparsifier) => self.sparsifier = Some(sparsifier),
            Stage::LowRank(low_rank) => self.low_rank = Some(low_rank),
            Stage::Quantiser(quantiser) => self.quantiser = Some(quantiser),
            Stage::Container(container) => self.container = Some(container),
            Stage::Bytes(bytes) => self.bytes = bytes,
        }
    }

    /// Refuses combinations of stages that make no sense although each stage is in its place.
    fn check(&self, specs: &[(Spec, Kind)]) -> Result<(), SpecError> {
        let name_of = |kind: Kind| specs.iter().find(|(_, of)| *of == kind).map(|(spec, _)| &spec.name);
        let refuse = |why: String| {
            let component = specs.iter().map(|(spec, _)| spec.to_string()).collect::<Vec<_>>().join("+");
            Err(SpecError::Parameter { component, why })
        };
        let lossy = [Kind::Sparsifier, Kind::LowRank, Kind::Quantiser].into_iter().find_map(name_of);
        if self.filters.iter().any(|filter| filter.wants_lossless()) {
            if let Some(name) = lossy {
                return refuse(format!(
                    "`{name}` loses something, and `lossless` promises that nothing is lost"
                ));
            }
            if self.changes_values() {
                return refuse("`clip` changes values, and `lossless` promises that nothing is lost".into());
            }
        }
        if let (Some(low_rank), Some(other)) =
            (name_of(Kind::LowRank), name_of(Kind::Sparsifier).or(name_of(Kind::Container)))
        {
            return refuse(format!(
                "`{low_rank}` sends matrices, which have no places to choose: leave out `{other}`"
            ));
        }
        if self.replaces().is_some() && specs.len() > 1 {
            return refuse("`delta` sends what has changed as it is now: it stands alone".into());
        }
        let feedback = self.filters.iter().any(|filter| filter.wants_residual());
        if feedback && lossy.is_none() {
            return refuse("nothing is lost here, so there is no error that `ef` could feed back".into());
        }
        let keeps = self.sparsifier.as_ref().is_none_or(|sparsifier| sparsifier.keeps_residual())
            && self.low_rank.as_ref().is_none_or(|low_rank| low_rank.keeps_residual());
        if let (true, false, Some(name)) = (feedback, keeps, lossy) {
            return refuse(format!(
                "`ef` keeps what is not sent, and `{name}` as it is written does not: say `residual=true` there, or \
                 leave out `ef`"
            ));
        }
        if let Some((quantiser, name)) = self.quantiser.as_ref().zip(name_of(Kind::Quantiser)) {
            let alone = self.sparsifier.is_none() && self.low_rank.is_none();
            if feedback && alone && !quantiser.feeds_back() {
                return refuse(format!(
                    "the error of `{name}` can be larger than what is sent, and a residual of it would grow: leave out \
                     `ef`"
                ));
            }
            if let Some(low_rank) = name_of(Kind::LowRank)
                && quantiser.bound(limits::BLOCK_ELEMENTS).of_norm > FINE
            {
                return refuse(format!(
                    "`{name}` is too coarse for the matrices of `{low_rank}`, whose errors multiply: take f16 or bf16"
                ));
            }
            if quantiser.needs_residual() && !keeps {
                return refuse(format!("`{name}` needs a residual, which the stage before it does not keep"));
            }
        }
        Ok(())
    }

    /// Whether it does nothing at all: values travel as they would without codec.
    pub fn is_none(&self) -> bool {
        self.is_lossless() && self.container.is_none() && self.bytes.is_none()
    }

    /// The type of elements that values travel as, where that is all it does: such frames are plain ones, and not payloads.
    pub fn element_type(&self) -> Option<DType> {
        if self.is_none() {
            return Some(DType::F32);
        }
        let is_alone = self.sparsifier.is_none()
            && self.low_rank.is_none()
            && matches!(self.container, None | Some(Container::Dense))
            && self.bytes.is_none()
            && self.filters.is_empty();
        self.quantiser.as_ref().filter(|_| is_alone)?.element_type()
    }

    /// The type of elements that values are rounded to before anything else is done.
    pub fn rounded_type(&self) -> DType {
        self.replaces().unwrap_or(DType::F32)
    }

    /// The element type of values that take the place of what the receiver holds, where they have changed in it.
    pub(crate) fn replaces(&self) -> Option<DType> {
        self.quantiser.as_ref().and_then(|quantiser| quantiser.replaces())
    }

    /// Whether what is received is what was sent, bit for bit.
    pub fn is_lossless(&self) -> bool {
        self.sparsifier.is_none()
            && self.low_rank.is_none()
            && self.quantiser.is_none()
            && !self.changes_values()
    }

    /// Whether what it fails to send is kept and sent later.
    pub fn keeps_residual(&self) -> bool {
        self.filters.iter().any(|filter| filter.wants_residual())
            || self.sparsifier.as_ref().is_some_and(|sparsifier| sparsifier.keeps_residual())
            || self.low_rank.as_ref().is_some_and(|low_rank| low_rank.keeps_residual())
            || self.quantiser.as_ref().is_some_and(|quantiser| quantiser.needs_residual())
    }

    /// Whether something is decided for whole layers at this step.
    pub(super) fn decides_by_layer(&self, step: u64) -> bool {
        self.low_rank.is_some()
            || self.sparsifier.as_ref().is_some_and(|sparsifier| sparsifier.largest(step, 1).is_some())
    }

    /// Whether it compares gradients with the sender's parameters.
    pub fn needs_parameters(&self) -> bool {
        self.sparsifier.as_ref().is_some_and(|sparsifier| sparsifier.needs_parameters())
    }

    /// The bytes per second that every link must carry, where the codec sends less if one does not.
    pub fn needs_bandwidth(&self) -> Option<f64> {
        self.sparsifier.as_ref()?.needs_bandwidth()
    }

    /// Whether it sends factors of a layer's matrix, which one server must have all of.
    pub fn needs_whole_layers(&self) -> bool {
        self.low_rank.is_some()
    }

    /// Whether it sends factors that the application offers with a gradient, and without an offer the gradient as it is.
    pub fn needs_offered_factors(&self) -> bool {
        self.low_rank.as_ref().is_some_and(|low_rank| low_rank.needs_offer())
    }

    /// Whether it is made for differences: of values themselves it would send some and lose the others.
    pub fn is_for_differences(&self) -> bool {
        self.keeps_residual()
            || self.sparsifier.is_some()
            || self.low_rank.is_some()
            || self.is_random()
            || self.replaces().is_some()
    }

    /// Whether the mean over its random choices is what was put in.
    pub fn is_unbiased(&self) -> bool {
        !self.keeps_residual()
            && !self.changes_values()
            && self.low_rank.is_none()
            && self.sparsifier.as_ref().is_none_or(|sparsifier| sparsifier.is_unbiased())
            && self.quantiser.as_ref().is_none_or(|quantiser| quantiser.is_unbiased())
    }

    fn is_random(&self) -> bool {
        self.quantiser.as_ref().is_some_and(|quantiser| !quantiser.feeds_back())
    }

    /// How far what is received may be from `count` values that were sent, where nothing was left from before.
    pub fn bound(&self, count: usize) -> Bound {
        let mut bounds = Vec::new();
        bounds.extend(self.sparsifier.as_ref().map(|sparsifier| sparsifier.bound(count)));
        bounds.extend(self.low_rank.as_ref().map(|low_rank| low_rank.bound()));
        // Scaled values are larger by the scale, and so is the error of quantising them.
        let scale = self.sparsifier.as_ref().map_or(1.0, |sparsifier| f64::from(sparsifier.scale(count)));
        bounds.extend(self.quantiser.as_ref().map(|quantiser| {
            let bound = quantiser.bound(count);
            Bound { of_norm: scale * bound.of_norm, ..bound }
        }));
        bounds.iter().fold(Bound::EXACT, |sum, bound| Bound {
            of_norm: sum.of_norm + bound.of_norm,
            absolute: sum.absolute + bound.absolute,
        })
    }

    /// The longest payload of `count` values: what does not shrink travels as it is.
    pub fn max_bytes(&self, count: usize) -> usize {
        super::PREFIX_BYTES + 4 * count
    }

    /// Names this chain in a payload.
    pub(super) fn tag(&self) -> u16 {
        self.tag
    }

    /// Whether a layer of so many elements is encoded once the chain has warmed up.
    pub fn encodes_layer_of(&self, elements: u64) -> bool {
        self.applies(&Context { step: u64::MAX, layer_elements: elements, ..Context::default() })
    }

    pub(super) fn applies(&self, context: &Context<'_>) -> bool {
        self.filters.iter().all(|filter| filter.applies(context))
    }

    pub(super) fn changes_values(&self) -> bool {
        self.filters.iter().any(|filter| filter.changes_values())
    }

    pub(super) fn prepare(&self, values: &mut [f32]) {
        self.filters.iter().for_each(|filter| filter.prepare(values));
    }

    /// How much of a velocity is kept, if there is one.
    pub(super) fn momentum(&self) -> Option<f32> {
        self.sparsifier.as_ref().filter(|_| !self.is_relay).and_then(|sparsifier| sparsifier.momentum())
    }

    /// The quantiser of a chain that is nothing else but for a byte compressor, and keeps nothing.
    pub(super) fn only_quantiser(&self, context: &Context<'_>) -> Option<&dyn Quantiser> {
        let is_plain = self.sparsifier.is_none()
            && self.low_rank.is_none()
            && matches!(self.container, None | Some(Container::Dense))
            && !self.keeps_residual()
            && !self.changes_values();
        self.quantiser.as_deref().filter(|_| is_plain && self.applies(context))
    }

    /// Whether what the quantiser rounds off goes into the residual.
    pub(super) fn feeds_back(&self) -> bool {
        self.quantiser.as_ref().is_some_and(|quantiser| quantiser.feeds_back())
    }

    /// The largest magnitude that is not cut down.
    pub(crate) fn largest(&self) -> f32 {
        self.quantiser.as_ref().map_or(f32::MAX, |quantiser| quantiser.largest())
    }

    /// Bytes of `count` values.
    pub(super) fn value_bytes(&self, count: usize) -> usize {
        self.quantiser.as_ref().map_or(4 * count, |quantiser| quantiser.bytes(count))
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Whether a stage may follow another.
fn check_order(spec: &Spec, kind: Kind, before: &Spec, last: Kind) -> Result<(), SpecError> {
    let (name, other) = (&spec.name, &before.name);
    spec.require(kind != last || kind == Kind::Filter, || {
        format!("the chain has a {kind} already, `{other}`; name one of the two")
    })?;
    spec.require(kind >= last, || {
        format!("a {kind} comes before a {last}: write `{name}` to the left of `{other}`")
    })
}
