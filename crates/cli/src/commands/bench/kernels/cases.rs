//! The loops that are measured, and the arrays that they run over.

use anyhow::{Result, bail};
use paramill_core::kernels::{self, Bf16, F16, Values};
use paramill_core::optimizer::{Gradient, OptimizerPolicy, StepInput};
use paramill_core::registry::Registry;
use paramill_core::store::Buffer;
use std::fmt;

const PAGE_BYTES: usize = 4096;
/// 0.001 in the two short formats, about.
const SMALL_F16: F16 = F16(0x1419);
const SMALL_BF16: Bf16 = Bf16(0x3a83);

/// A loop over a gradient of one type.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) work: Work,
    pub(super) element: Element,
}

/// What a loop does.
#[derive(Debug)]
pub(super) enum Work {
    /// A copy by the system's own means.
    Copy,
    /// Reads one array.
    Read,
    /// Reads and writes one array.
    Scale,
    /// Adds a gradient to a sum.
    Add,
    /// Adds the last gradient and makes a step with the sum.
    AddAndStep(Box<OptimizerPolicy>),
}

/// Type of a gradient's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    pub(super) fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
        }
    }
}

/// Every loop, with the optimizers of these names, or all.
pub(super) fn all(registry: &Registry, names: &[String]) -> Result<Vec<Case>> {
    let known: Vec<&str> = registry.optimizer.entries().iter().map(|entry| entry.name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("unknown optimizer `{unknown}`; known: {}", known.join(", "));
    }
    let mut cases: Vec<Case> = [Work::Copy, Work::Read, Work::Scale]
        .into_iter()
        .map(|work| Case { work, element: Element::F32 })
        .collect();
    let elements = [Element::F32, Element::F16, Element::Bf16];
    cases.extend(elements.map(|element| Case { work: Work::Add, element }));
    for name in known.into_iter().filter(|name| names.is_empty() || names.iter().any(|asked| asked == name)) {
        for element in elements {
            // So small a rate that parameters stay where they are, however often they are stepped.
            let optimizer = OptimizerPolicy::parse(&registry.optimizer, &format!("{name}:lr=1e-9"))?;
            cases.push(Case { work: Work::AddAndStep(Box::new(optimizer)), element });
        }
    }
    Ok(cases)
}

impl Work {
    /// Whether it shows what memory can do, rather than what a kernel does.
    pub(super) fn is_yardstick(&self) -> bool {
        matches!(self, Work::Copy | Work::Read | Work::Scale)
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Copy => f.write_str("copy"),
            Work::Read => f.write_str("read"),
            Work::Scale => f.write_str("scale"),
            Work::Add => f.write_str("add"),
            Work::AddAndStep(optimizer) => {
                let text = optimizer.to_string();
                write!(f, "add + {}", text.split(':').next().unwrap_or(&text))
            }
        }
    }
}

impl Case {
    /// Bytes that are read or written for each element.
    pub(super) fn bytes_per_element(&self) -> usize {
        match &self.work {
            Work::Read => 4,
            Work::Copy | Work::Scale => 8,
            Work::Add => self.element.bytes() + 8,
            // The last gradient, the sum before it, parameters and state; the latter are also written.
            Work::AddAndStep(optimizer) => self.element.bytes() + 4 + 8 * (1 + optimizer.slots()),
        }
    }

    /// One pass.
    pub(super) fn run(&self, arrays: &mut Arrays) {
        let Arrays { parameters, sum, slots, f32, f16, bf16 } = arrays;
        let (parameters, sum) = (parameters.as_mut_slice(), sum.as_mut_slice());
        let last = match self.element {
            Element::F32 => Values::F32(f32.as_slice()),
            Element::F16 => Values::F16(f16.as_slice()),
            Element::Bf16 => Values::Bf16(bf16.as_slice()),
        };
        match &self.work {
            Work::Copy => sum.copy_from_slice(std::hint::black_box(f32.as_slice())),
            Work::Read => {
                std::hint::black_box(kernels::all_finite(std::hint::black_box(f32.as_slice())));
            }
            Work::Scale => kernels::scale(parameters, std::hint::black_box(1.0)),
            Work::Add => kernels::add_values(sum, last),
            Work::AddAndStep(optimizer) => {
                let input = StepInput {
                    version: 0,
                    t: 1,
                    scale: 0.5,
                    lr_factor: 1.0,
                    parameter_norm: 1.0,
                    gradient_norm: 1.0,
                };
                let mut slots: Vec<&mut [f32]> =
                    slots.iter_mut().take(optimizer.slots()).map(Buffer::as_mut_slice).collect();
                let gradient = Gradient { before: Some(sum), last };
                optimizer.step_with(input, parameters, gradient, &mut slots);
            }
        }
    }
}

/// What one thread works on.
pub(super) struct Arrays {
    parameters: Buffer,
    sum: Buffer,
    slots: Vec<Buffer>,
    f32: Buffer,
    f16: Aligned<F16>,
    bf16: Aligned<Bf16>,
}

impl Arrays {
    /// All pages are touched.
    pub(super) fn new(elements: usize) -> Arrays {
        let filled = |value: f32| {
            let mut buffer = Buffer::zeroed(elements);
            buffer.as_mut_slice().fill(value);
            buffer
        };
        Arrays {
            parameters: filled(0.5),
            sum: filled(0.001),
            slots: (0..paramill_core::optimizer::MAX_SLOTS).map(|_| filled(0.001)).collect(),
            f32: filled(0.001),
            f16: Aligned::new(SMALL_F16, elements),
            bf16: Aligned::new(SMALL_BF16, elements),
        }
    }

    pub(super) fn elements(&self) -> usize {
        self.f32.len()
    }
}

/// Elements that begin with a page, as those in a receive buffer nearly do.
struct Aligned<T> {
    elements: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy> Aligned<T> {
    fn new(value: T, len: usize) -> Aligned<T> {
        let elements = vec![value; len + PAGE_BYTES / size_of::<T>()];
        let start = elements.as_ptr().align_offset(PAGE_BYTES).min(elements.len() - len);
        Aligned { elements, start, len }
    }

    fn as_slice(&self) -> &[T] {
        &self.elements[self.start..][..self.len]
    }
}
