//! Conditions as expressions over the exposed state: `progress < v_train + 3 || rand() > 0.5`.
//!
//! There are numbers (f64) and conditions (true or false). From loosest to tightest: `||`, `&&`, `==` `!=`,
//! `<` `<=` `>` `>=`, `+` `-`, `*` `/` `%`, then `!` and unary `-`; parentheses; the functions of [`FUNCTIONS`] and the
//! variables of [`VARIABLES`]. `&&`, `||` and `if` look at no more than they need, so that `rand()` draws only where
//! chance decides. Division by zero gives an infinity, and a comparison with what is not a number is false.
//!
//! An expression is checked when it is set: syntax, names, types, length and depth. Evaluating it cannot fail.

mod parser;

pub use parser::ExpressionError;

use super::{PullView, SyncState};
use crate::prng::Prng;

/// What a condition may speak of: name and meaning. Those of [`PULL_VARIABLES`] are known only while a pull is judged.
pub const VARIABLES: &[(&str, &str)] = &[
    ("v_train", "the table's version here: every round below it is closed"),
    ("n", "live workers"),
    ("count", "live workers that have pushed the open round, which is round v_train"),
    ("fastest", "progress of the worker that is furthest ahead, -1 when none has pushed"),
    ("slowest", "progress of the worker that is furthest behind, -1 before its first push"),
];

/// Variables of a pull condition only.
pub const PULL_VARIABLES: &[(&str, &str)] = &[
    ("progress", "the last iteration that the puller completed"),
    ("gap", "progress - v_train"),
    ("staleness", "rounds that an answer would lack: gap + 1, at least 0"),
    ("significance", "|g|/|w| of the puller's last push; not a number when not measured yet"),
];

/// Functions: how they are written, and what they give.
pub const FUNCTIONS: &[(&str, &str)] = &[
    ("rand()", "uniform in [0, 1); in pull conditions only"),
    ("min(a, b, ...)", "the least"),
    ("max(a, b, ...)", "the greatest"),
    ("abs(a)", "the magnitude"),
    ("exp(a)", "e to the power of a"),
    ("sqrt(a)", "the square root"),
    ("floor(a)", "the next whole number below"),
    ("if(condition, a, b)", "a if the condition holds, else b; both numbers or both conditions"),
];

/// What a condition is for, which decides what it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Whether a pull is answered.
    Pull,
    /// Whether a round closes. There is no puller, and no chance: it is asked whenever something happens.
    Push,
}

/// A checked condition.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    truth: Truth,
    uses_significance: bool,
}

impl Condition {
    /// Reads and checks a condition.
    pub fn parse(text: &str, scope: Scope) -> Result<Condition, ExpressionError> {
        parser::parse(text, scope)
    }

    /// Whether it holds for this pull.
    pub fn holds_for_pull(&self, state: &SyncState, pull: &PullView, rng: &mut Prng) -> bool {
        self.truth.value(&mut Scene { state, pull: Some(pull), rng: Some(rng) })
    }

    /// Whether it holds for the open round.
    pub fn holds_for_push(&self, state: &SyncState) -> bool {
        self.truth.value(&mut Scene { state, pull: None, rng: None })
    }

    /// Whether it speaks of `significance`, which then has to be measured.
    pub fn uses_significance(&self) -> bool {
        self.uses_significance
    }
}

/// What an evaluation can look at. The parser saw to it that a push condition asks for no pull and no chance.
struct Scene<'a> {
    state: &'a SyncState,
    pull: Option<&'a PullView>,
    rng: Option<&'a mut Prng>,
}

/// An expression that is a number.
#[derive(Debug, Clone, PartialEq)]
enum Number {
    Literal(f64),
    Variable(Variable),
    Rand,
    Negate(Box<Number>),
    Arithmetic(Arithmetic, Box<[Number; 2]>),
    Call(Function, Vec<Number>),
    If(Box<(Truth, Number, Number)>),
}

/// An expression that is true or false.
#[derive(Debug, Clone, PartialEq)]
enum Truth {
    Literal(bool),
    Not(Box<Truth>),
    And(Box<[Truth; 2]>),
    Or(Box<[Truth; 2]>),
    Equal(Box<[Truth; 2]>),
    Compare(Comparison, Box<[Number; 2]>),
    If(Box<(Truth, Truth, Truth)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variable {
    VTrain,
    N,
    Count,
    Fastest,
    Slowest,
    Progress,
    Gap,
    Staleness,
    Significance,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
    Min,
    Max,
    Abs,
    Exp,
    Sqrt,
    Floor,
}

impl Number {
    /// The recursion is as deep as the expression, which the parser limits.
    fn value(&self, scene: &mut Scene<'_>) -> f64 {
        match self {
            Number::Literal(value) => *value,
            Number::Variable(variable) => variable.value(scene),
            Number::Rand => scene.rng.as_mut().map_or(f64::NAN, |rng| rng.uniform()),
            Number::Negate(of) => -of.value(scene),
            Number::Arithmetic(operation, sides) => {
                let (left, right) = (sides[0].value(scene), sides[1].value(scene));
                match operation {
                    Arithmetic::Add => left + right,
                    Arithmetic::Subtract => left - right,
                    Arithmetic::Multiply => left * right,
                    Arithmetic::Divide => left / right,
                    Arithmetic::Remainder => left % right,
                }
            }
            Number::Call(function, arguments) => {
                let mut values = arguments.iter().map(|argument| argument.value(scene));
                let first = values.next().unwrap_or(f64::NAN);
                match function {
                    Function::Min => values.fold(first, f64::min),
                    Function::Max => values.fold(first, f64::max),
                    Function::Abs => first.abs(),
                    Function::Exp => first.exp(),
                    Function::Sqrt => first.sqrt(),
                    Function::Floor => first.floor(),
                }
            }
            Number::If(parts) => {
                let (condition, then, otherwise) = &**parts;
                if condition.value(scene) { then.value(scene) } else { otherwise.value(scene) }
            }
        }
    }
}

impl Truth {
    /// The recursion is as deep as the expression, which the parser limits.
    fn value(&self, scene: &mut Scene<'_>) -> bool {
        match self {
            Truth::Literal(value) => *value,
            Truth::Not(of) => !of.value(scene),
            Truth::And(sides) => sides[0].value(scene) && sides[1].value(scene),
            Truth::Or(sides) => sides[0].value(scene) || sides[1].value(scene),
            Truth::Equal(sides) => sides[0].value(scene) == sides[1].value(scene),
            Truth::Compare(comparison, sides) => {
                let (left, right) = (sides[0].value(scene), sides[1].value(scene));
                match comparison {
                    Comparison::Equal => left == right,
                    // Unlike IEEE 754, so that every comparison with what is not a number is false.
                    Comparison::NotEqual => left.partial_cmp(&right).is_some_and(|order| order.is_ne()),
                    Comparison::Less => left < right,
                    Comparison::LessOrEqual => left <= right,
                    Comparison::Greater => left > right,
                    Comparison::GreaterOrEqual => left >= right,
                }
            }
            Truth::If(parts) => {
                let (condition, then, otherwise) = &**parts;
                if condition.value(scene) { then.value(scene) } else { otherwise.value(scene) }
            }
        }
    }
}

impl Variable {
    fn value(self, scene: &Scene<'_>) -> f64 {
        let state = scene.state;
        let of_pull =
            |value: fn(&SyncState, &PullView) -> f64| scene.pull.map_or(f64::NAN, |pull| value(state, pull));
        match self {
            Variable::VTrain => state.v_train() as f64,
            Variable::N => f64::from(state.n()),
            Variable::Count => f64::from(state.count()),
            Variable::Fastest => state.fastest().map_or(-1.0, |(_, progress)| progress as f64),
            Variable::Slowest => state.slowest().map_or(-1.0, |(_, progress)| progress as f64),
            Variable::Progress => of_pull(|_, pull| pull.progress as f64),
            Variable::Gap => of_pull(|state, pull| state.gap(pull.progress) as f64),
            Variable::Staleness => of_pull(|state, pull| state.staleness(pull.progress) as f64),
            Variable::Significance => of_pull(|_, pull| pull.significance.unwrap_or(f64::NAN)),
        }
    }
}
