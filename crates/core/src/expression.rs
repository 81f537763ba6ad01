//! Conditions as expressions over exposed state: `progress < v_train + 3 || rand() > 0.5`. Consistency models have some about pulls
//! and rounds, and [`crate::hold`] about updates.
//!
//! There are numbers (f64) and conditions (true or false). From loosest to tightest: `||`, `&&`, `==` `!=`,
//! `<` `<=` `>` `>=`, `+` `-`, `*` `/` `%`, then `!` and unary `-`; parentheses; the functions of [`FUNCTIONS`] and the
//! variables of [`VARIABLES`]. `&&`, `||` and `if` look at no more than they need, so that `rand()` draws only where
//! chance decides. Division by zero gives an infinity, and a comparison with what is not a number is false.
//!
//! An expression is checked when it is set: syntax, names, types, length and depth. Evaluating it cannot fail.

mod parser;

pub use parser::ExpressionError;

use crate::consistency::{PullView, SyncState};
use crate::hold::UpdateView;
use crate::prng::Prng;

/// The variables of conditions of pulls and rounds: name and meaning. Those of [`PULL_VARIABLES`] are known only while a pull is judged.
pub const VARIABLES: &[(&str, &str)] = &[
    ("v_train", "the table's version here: every round below it is closed"),
    ("n", "live workers"),
    ("count", "live workers that have pushed the open round, which is round v_train"),
    ("fastest", "progress of the worker that is furthest ahead, -1 when none has pushed"),
    ("slowest", "progress of the worker that is furthest behind, -1 before its first push"),
    (
        "imbalance",
        "share of its time that the fastest worker would wait in lockstep, when the version last advanced; 0 when not known",
    ),
];

/// Variables of a pull condition only.
pub const PULL_VARIABLES: &[(&str, &str)] = &[
    ("progress", "the last iteration that the puller completed"),
    ("gap", "progress - v_train"),
    ("staleness", "rounds that an answer would lack: gap + 1, at least 0"),
    ("significance", "|g|/|w| of the puller's last push; not a number when not measured yet"),
];

/// Variables of a condition by which a worker holds an update back.
pub const UPDATE_VARIABLES: &[(&str, &str)] = &[
    ("significance", "|u|/|w|: the norm of the update over that of the parameters"),
    (
        "coherence",
        "|u|^2 over the sum of |g|^2 of its gradients: 1 where they are unrelated, their number where they agree",
    ),
    ("norm", "|u|, the norm of the update"),
    ("held", "pushes since the one that its oldest gradient was meant for"),
    ("clock", "the iteration"),
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

/// The purpose of a condition, which decides which variables it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Whether a pull is answered.
    Pull,
    /// Whether a round closes. There is no puller, and no chance: it is asked whenever something happens.
    Push,
    /// Whether an update is held back on its worker, which knows neither versions nor other workers. There is no chance.
    Hold,
}

impl Scope {
    /// The variables that it may use.
    fn variables(self) -> impl Iterator<Item = &'static str> {
        let lists: &[&[(&'static str, &'static str)]] = match self {
            Scope::Pull => &[VARIABLES, PULL_VARIABLES],
            Scope::Push => &[VARIABLES],
            Scope::Hold => &[UPDATE_VARIABLES],
        };
        lists.iter().flat_map(|list| list.iter()).map(|(name, _)| *name)
    }
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
        self.truth.value(&mut Scene { state: Some(state), pull: Some(pull), update: None, rng: Some(rng) })
    }

    /// Whether it holds for the open round.
    pub fn holds_for_push(&self, state: &SyncState) -> bool {
        self.truth.value(&mut Scene { state: Some(state), pull: None, update: None, rng: None })
    }

    /// Whether it holds for this update.
    pub fn holds_for_update(&self, update: &UpdateView) -> bool {
        self.truth.value(&mut Scene { state: None, pull: None, update: Some(update), rng: None })
    }

    /// Whether it speaks of `significance`, which then has to be measured.
    pub fn uses_significance(&self) -> bool {
        self.uses_significance
    }
}

/// The inputs of an evaluation. The parser saw to it that a condition asks only for those of its [`Scope`].
struct Scene<'a> {
    state: Option<&'a SyncState>,
    pull: Option<&'a PullView>,
    update: Option<&'a UpdateView>,
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
    Imbalance,
    Progress,
    Gap,
    Staleness,
    Significance,
    Coherence,
    Norm,
    Held,
    Clock,
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
        let of_state = |value: fn(&SyncState) -> f64| scene.state.map_or(f64::NAN, value);
        let of_pull = |value: fn(&SyncState, &PullView) -> f64| {
            scene.state.zip(scene.pull).map_or(f64::NAN, |(state, pull)| value(state, pull))
        };
        let of_update = |value: fn(&UpdateView) -> f64| scene.update.map_or(f64::NAN, value);
        match self {
            Variable::VTrain => of_state(|state| state.v_train() as f64),
            Variable::N => of_state(|state| f64::from(state.n())),
            Variable::Count => of_state(|state| f64::from(state.count())),
            Variable::Fastest => {
                of_state(|state| state.fastest().map_or(-1.0, |(_, progress)| progress as f64))
            }
            Variable::Slowest => {
                of_state(|state| state.slowest().map_or(-1.0, |(_, progress)| progress as f64))
            }
            Variable::Imbalance => of_state(SyncState::imbalance),
            Variable::Progress => of_pull(|_, pull| pull.progress as f64),
            Variable::Gap => of_pull(|state, pull| state.gap(pull.progress) as f64),
            Variable::Staleness => of_pull(|state, pull| state.staleness(pull.progress) as f64),
            Variable::Significance => match scene.update {
                Some(update) => update.significance(),
                None => of_pull(|_, pull| pull.significance.unwrap_or(f64::NAN)),
            },
            Variable::Coherence => of_update(UpdateView::coherence),
            Variable::Norm => of_update(|update| update.squared_norm.sqrt()),
            Variable::Held => of_update(|update| update.held as f64),
            Variable::Clock => of_update(|update| update.clock as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::WorkerId;
    use proptest::prelude::*;

    /// Worker 1 pulls with progress 7 at version 5 of three workers at 4, 7 and 5.
    fn holds(text: &str) -> bool {
        let condition = Condition::parse(text, Scope::Pull).unwrap_or_else(|error| panic!("{text}: {error}"));
        let pull = PullView { worker: WorkerId(1), progress: 7, significance: Some(0.25) };
        condition.holds_for_pull(&SyncState::at(5, &[4, 7, 5]), &pull, &mut Prng::new(1))
    }

    #[test]
    fn every_variable_and_function() {
        for text in [
            "progress == 7 && v_train == 5 && n == 3 && count == 2 && fastest == 7 && slowest == 4",
            "gap == 2 && staleness == 3 && significance == 0.25",
            "rand() >= 0 && rand() < 1",
            "min(3, 1, 2) == 1 && max(3, 1, 2) == 3",
            "abs(-2) == 2 && sqrt(16) == 4 && floor(-0.5) == -1 && exp(0) == 1",
            "if(gap > 1, 10, 20) == 10 && if(gap > 2, false, true)",
        ] {
            assert!(holds(text), "{text}");
        }
    }

    #[test]
    fn every_variable_of_an_update() {
        let update = UpdateView {
            squared_norm: 4.0,
            squared_parameters: 64.0,
            sum_of_squares: 8.0,
            held: 3,
            clock: 7,
        };
        for text in [
            "significance == 0.25 && coherence == 0.5 && norm == 2",
            "held == 3 && clock == 7 && significance < 1 / sqrt(clock + 1)",
        ] {
            assert!(Condition::parse(text, Scope::Hold).unwrap().holds_for_update(&update), "{text}");
        }
    }

    #[test]
    fn precedence_and_associativity() {
        for text in [
            "1 + 2 * 3 == 7",
            "(1 + 2) * 3 == 9",
            "10 - 4 - 3 == 3",
            "24 / 4 / 2 == 3",
            "7 % 4 * 2 == 6",
            "-2 * -2 == 4 && - - 2 == 2",
            "true || false && false",
            "!false && !(1 > 2)",
            "1 < 2 == 3 < 4",
            "(1 < 2) != (4 < 3)",
            "2e3 == 2000 && 1.5e-1 == 0.15 && .5 == 0.5",
        ] {
            assert!(holds(text), "{text}");
        }
    }

    #[test]
    fn zero_divides_and_nothing_compares_with_what_is_no_number() {
        assert!(holds("1 / 0 > 1e300"));
        for comparison in ["==", "!=", "<", "<=", ">", ">="] {
            assert!(!holds(&format!("0 / 0 {comparison} 0")), "{comparison}");
        }
    }

    #[test]
    fn draws_only_what_it_needs() {
        let condition = Condition::parse("progress < v_train + 3 || rand() > 0.5", Scope::Pull).unwrap();
        let state = SyncState::at(5, &[4, 7]);
        let (mut used, mut fresh) = (Prng::new(9), Prng::new(9));
        let pull = PullView { worker: WorkerId(1), progress: 7, significance: None };
        assert!(condition.holds_for_pull(&state, &pull, &mut used));
        assert_eq!(used.next_u64(), fresh.next_u64());
    }

    #[test]
    fn errors_say_where_and_what_was_expected() {
        for (text, scope, at, why) in [
            ("", Scope::Pull, 1, "expected a number, a name, `(`, `!` or `-`, found the end"),
            ("progress <", Scope::Pull, 11, "expected a number"),
            ("progress < < 3", Scope::Pull, 12, "found `<`"),
            ("progress < 3 4", Scope::Pull, 14, "expected an operator or the end, found `4`"),
            ("(progress < 3", Scope::Pull, 14, "expected an operator or `)`, found the end"),
            ("progress = 3", Scope::Pull, 10, "`=` has no meaning here; compare with `==`"),
            ("n > 1 | n > 2", Scope::Pull, 7, "or is `||`"),
            ("größe < 3", Scope::Pull, 3, "`ö` has no meaning here"),
            ("1.2.3 < 4", Scope::Pull, 1, "`1.2.3` is not a number"),
            (
                "foo < 3",
                Scope::Pull,
                1,
                "unknown name `foo`; known: v_train, n, count, fastest, slowest, imbalance;",
            ),
            ("n < foo(3)", Scope::Pull, 5, "unknown function `foo`; known: rand(), min(a, b, ...)"),
            ("n < rand", Scope::Pull, 5, "`rand` is a function: write `rand()`"),
            ("n < min(3)", Scope::Pull, 5, "`min` takes at least 2 arguments, not 1"),
            ("n < abs(3, 4)", Scope::Pull, 5, "`abs` takes 1 argument, not 2"),
            (
                "n",
                Scope::Pull,
                1,
                "a condition is expected, such as `progress < v_train + 3`; this is a number",
            ),
            ("n && true", Scope::Pull, 1, "`&&` takes conditions; this is a number"),
            ("true || n", Scope::Pull, 9, "`||` takes conditions; this is a number"),
            ("1 < 2 < 3", Scope::Pull, 1, "`<` compares numbers; this is a condition"),
            ("n == true", Scope::Pull, 3, "`==` compares two numbers or two conditions"),
            ("!n", Scope::Pull, 2, "`!` takes a condition; this is a number"),
            ("-true < 1", Scope::Pull, 2, "`-` takes a number; this is a condition"),
            ("if(n, 1, 2) > 0", Scope::Pull, 4, "the first argument of `if` is a condition"),
            ("if(true, 1, false) > 0", Scope::Pull, 13, "both numbers or both conditions"),
            ("count >= progress", Scope::Push, 10, "`progress` is of a pull; a push condition has no puller"),
            ("rand() > 0.5", Scope::Push, 1, "`rand()` is for pull conditions"),
            ("rand() > 0.5", Scope::Hold, 1, "`rand()` is for pull conditions"),
            (
                "n > 3",
                Scope::Hold,
                1,
                "`n` is not known here: a worker judges an update by significance, coherence, norm, held, clock",
            ),
            ("held > 3", Scope::Pull, 1, "`held` is of an update that a worker holds back"),
            ("coherence > 3", Scope::Push, 1, "`coherence` is of an update that a worker holds back"),
        ] {
            let error = Condition::parse(text, scope).unwrap_err();
            assert_eq!(error.at, at, "{text}: {error}");
            assert!(error.why.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn length_and_depth_are_limited() {
        let parse = |text: String| Condition::parse(&text, Scope::Pull);
        let nested = |levels| format!("{}n > 0{}", "(".repeat(levels), ")".repeat(levels));
        assert!(parse(nested(32)).is_ok());
        for text in [
            nested(33),
            format!("{}true", "!".repeat(40)),
            format!("n > {}1", "-".repeat(40)),
            format!("n > 1{}", " + 1".repeat(40)),
            format!("{}n > 0{}", "if(true, ".repeat(40), ", false)".repeat(40)),
        ] {
            assert!(parse(text.clone()).unwrap_err().why.contains("more than 32 levels"), "{text}");
        }
        assert!(parse(" ".repeat(1025)).unwrap_err().why.contains("at most 1024"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[a-z_0-9.()!<>=&|+*/%, ö-]{0,60}") {
            if let Ok(condition) = Condition::parse(&text, Scope::Pull) {
                let pull = PullView { worker: WorkerId(0), progress: i64::MAX, significance: None };
                condition.holds_for_pull(&SyncState::default(), &pull, &mut Prng::new(1));
            }
        }

        #[test]
        fn any_tokens_are_read_or_refused(tokens in proptest::collection::vec(proptest::sample::select(&[
            "progress", "n", "gap", "significance", "1", "0.5", "true", "rand()", "min(", "if(", "(", ")", ",",
            "<", "==", "&&", "||", "!", "+", "-", "/", "%",
        ][..]), 0..30)) {
            let text = tokens.join(" ");
            if let Ok(condition) = Condition::parse(&text, Scope::Pull) {
                let pull = PullView { worker: WorkerId(0), progress: -1, significance: None };
                condition.holds_for_pull(&SyncState::at(3, &[2, 5]), &pull, &mut Prng::new(1));
            }
        }
    }
}
