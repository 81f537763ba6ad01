//! Text to a checked condition, in one pass: every node has its type when it is made.

use super::{
    Arithmetic, Comparison, Condition, FUNCTIONS, Function, Number, PULL_VARIABLES, Scope, Truth,
    UPDATE_VARIABLES, VARIABLES, Variable,
};
use crate::limits::{MAX_EXPRESSION_BYTES, MAX_EXPRESSION_DEPTH};

/// Why an expression cannot be used. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at character {at}: {why}")]
pub struct ExpressionError {
    /// Position, counted in characters from 1.
    pub at: usize,
    /// The error, and what was expected.
    pub why: String,
}

pub(super) fn parse(text: &str, scope: Scope) -> Result<Condition, ExpressionError> {
    if text.len() > MAX_EXPRESSION_BYTES {
        let why =
            format!("the expression has {} bytes, at most {MAX_EXPRESSION_BYTES} are taken", text.len());
        return Err(ExpressionError { at: 1, why });
    }
    let mut parser =
        Parser { text, end: 0, start: 0, token: Token::End, scope, nesting: 0, uses_significance: false };
    parser.next()?;
    let expression = parser.binary(0)?;
    if parser.token != Token::End {
        return Err(parser.unexpected("an operator or the end"));
    }
    let truth = parser.truth(expression, "a condition is expected, such as `progress < v_train + 3`")?;
    Ok(Condition { truth, uses_significance: parser.uses_significance })
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Token<'a> {
    Number(f64),
    Name(&'a str),
    /// An operator, a parenthesis or a comma.
    Symbol(&'static str),
    End,
}

/// Longer ones first, so that `<=` is not read as `<`.
const SYMBOLS: &[&str] =
    &["||", "&&", "==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "!", "(", ")", ","];

struct Parser<'a> {
    text: &'a str,
    token: Token<'a>,
    /// Bytes of the token.
    start: usize,
    end: usize,
    scope: Scope,
    nesting: u32,
    uses_significance: bool,
}

/// A typed expression, where it begins, and how deep it is.
struct Typed {
    node: Node,
    at: usize,
    depth: u32,
}

enum Node {
    Number(Number),
    Truth(Truth),
}

impl<'a> Parser<'a> {
    /// Operators of at least this precedence, to the left.
    fn binary(&mut self, least: u8) -> Result<Typed, ExpressionError> {
        let mut left = self.unary()?;
        while let Token::Symbol(symbol) = self.token {
            let Some(precedence) = precedence(symbol).filter(|&precedence| precedence >= least) else {
                break;
            };
            let at = self.start;
            self.next()?;
            let right = self.binary(precedence + 1)?;
            left = self.combine(symbol, at, left, right)?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Typed, ExpressionError> {
        let (at, symbol) = (self.start, self.token);
        match symbol {
            Token::Symbol("!") => {
                self.next()?;
                let of = self.nested(Parser::unary)?;
                let depth = of.depth;
                let of = self.truth(of, "`!` takes a condition")?;
                self.node(Node::Truth(Truth::Not(Box::new(of))), at, depth)
            }
            Token::Symbol("-") => {
                self.next()?;
                let of = self.nested(Parser::unary)?;
                let depth = of.depth;
                let of = self.number(of, "`-` takes a number")?;
                self.node(Node::Number(Number::Negate(Box::new(of))), at, depth)
            }
            _ => self.primary(),
        }
    }

    fn primary(&mut self) -> Result<Typed, ExpressionError> {
        let at = self.start;
        match self.token {
            Token::Number(value) => {
                self.next()?;
                self.node(Node::Number(Number::Literal(value)), at, 0)
            }
            Token::Symbol("(") => {
                self.next()?;
                let inner = self.nested(|parser| parser.binary(0))?;
                self.expect(")")?;
                Ok(inner)
            }
            Token::Name(name) => {
                self.next()?;
                if self.token == Token::Symbol("(") { self.call(name, at) } else { self.name(name, at) }
            }
            Token::Symbol(_) | Token::End => Err(self.unexpected("a number, a name, `(`, `!` or `-`")),
        }
    }

    fn name(&mut self, name: &str, at: usize) -> Result<Typed, ExpressionError> {
        if let "true" | "false" = name {
            return self.node(Node::Truth(Truth::Literal(name == "true")), at, 0);
        }
        let Some(variable) = variable(name) else {
            let known = |list: &[(&'static str, _)]| list.iter().map(|&(name, _)| name).collect::<Vec<_>>();
            let why = match FUNCTIONS.iter().find(|(call, _)| call.split('(').next() == Some(name)) {
                Some((call, _)) => format!("`{name}` is a function: write `{call}`"),
                None if self.scope == Scope::Hold => format!(
                    "unknown name `{name}`; known: {}; functions: {}",
                    known(UPDATE_VARIABLES).join(", "),
                    known(&FUNCTIONS[1..]).join(", ")
                ),
                None => format!(
                    "unknown name `{name}`; known: {}; in pull conditions: {}; functions: {}",
                    known(VARIABLES).join(", "),
                    known(PULL_VARIABLES).join(", "),
                    known(FUNCTIONS).join(", ")
                ),
            };
            return Err(self.error(at, why));
        };
        if !self.scope.variables().any(|known| known == name) {
            return Err(self.error(at, self.misplaced(name)));
        }
        self.uses_significance |= variable == Variable::Significance;
        self.node(Node::Number(Number::Variable(variable)), at, 0)
    }

    /// A sentence about a variable that conditions of another scope have.
    fn misplaced(&self, name: &str) -> String {
        let is_in = |list: &[(&str, &str)]| list.iter().any(|(known, _)| *known == name);
        match self.scope {
            Scope::Hold => {
                let known: Vec<&str> = self.scope.variables().collect();
                format!("`{name}` is not known here: a worker judges an update by {}", known.join(", "))
            }
            Scope::Push if is_in(PULL_VARIABLES) => {
                format!("`{name}` is of a pull; a push condition has no puller")
            }
            Scope::Pull | Scope::Push => {
                format!("`{name}` is of an update that a worker holds back (policy `hold`)")
            }
        }
    }

    fn call(&mut self, name: &str, at: usize) -> Result<Typed, ExpressionError> {
        let arguments = self.nested(Parser::arguments)?;
        let depth = arguments.iter().map(|argument| argument.depth).max().unwrap_or(0);
        let function = match name {
            "rand" => {
                self.arity(name, at, &arguments, 0, 0)?;
                let instead = match self.scope {
                    Scope::Pull => None,
                    Scope::Push => Some("a round closes by what was pushed"),
                    Scope::Hold => Some("an update is held back by what is in it"),
                };
                if let Some(instead) = instead {
                    return Err(
                        self.error(at, format!("`rand()` is for pull conditions; {instead}, not by chance"))
                    );
                }
                return self.node(Node::Number(Number::Rand), at, depth);
            }
            "if" => {
                self.arity(name, at, &arguments, 3, 3)?;
                let node = self.choice(arguments)?;
                return self.node(node, at, depth);
            }
            "min" => Function::Min,
            "max" => Function::Max,
            "abs" => Function::Abs,
            "exp" => Function::Exp,
            "sqrt" => Function::Sqrt,
            "floor" => Function::Floor,
            _ => {
                let known = FUNCTIONS.iter().map(|&(call, _)| call).collect::<Vec<_>>().join(", ");
                return Err(self.error(at, format!("unknown function `{name}`; known: {known}")));
            }
        };
        match function {
            Function::Min | Function::Max => self.arity(name, at, &arguments, 2, usize::MAX)?,
            _ => self.arity(name, at, &arguments, 1, 1)?,
        }
        let why = format!("`{name}` takes numbers");
        let arguments: Result<Vec<Number>, _> =
            arguments.into_iter().map(|argument| self.number(argument, &why)).collect();
        self.node(Node::Number(Number::Call(function, arguments?)), at, depth)
    }

    /// `(`, expressions with commas between them, `)`.
    fn arguments(&mut self) -> Result<Vec<Typed>, ExpressionError> {
        self.expect("(")?;
        let mut arguments = Vec::new();
        if self.token != Token::Symbol(")") {
            arguments.push(self.binary(0)?);
            while self.token == Token::Symbol(",") {
                self.next()?;
                arguments.push(self.binary(0)?);
            }
        }
        self.expect(")")?;
        Ok(arguments)
    }

    fn choice(&self, arguments: Vec<Typed>) -> Result<Node, ExpressionError> {
        let [condition, then, otherwise]: [Typed; 3] =
            arguments.try_into().ok().expect("the caller counted three arguments");
        let condition = self.truth(condition, "the first argument of `if` is a condition")?;
        let why = "the last two arguments of `if` are both numbers or both conditions";
        Ok(match then.node {
            Node::Number(then) => {
                Node::Number(Number::If(Box::new((condition, then, self.number(otherwise, why)?))))
            }
            Node::Truth(then) => {
                Node::Truth(Truth::If(Box::new((condition, then, self.truth(otherwise, why)?))))
            }
        })
    }

    fn combine(
        &self,
        symbol: &'static str,
        at: usize,
        left: Typed,
        right: Typed,
    ) -> Result<Typed, ExpressionError> {
        let (begin, depth) = (left.at, left.depth.max(right.depth));
        let node = match symbol {
            "||" | "&&" => {
                let why = format!("`{symbol}` takes conditions");
                let sides = Box::new([self.truth(left, &why)?, self.truth(right, &why)?]);
                Node::Truth(if symbol == "||" { Truth::Or(sides) } else { Truth::And(sides) })
            }
            "+" | "-" | "*" | "/" | "%" => {
                let why = format!("`{symbol}` takes numbers");
                let sides = Box::new([self.number(left, &why)?, self.number(right, &why)?]);
                Node::Number(Number::Arithmetic(arithmetic(symbol), sides))
            }
            "==" | "!=" => match (left.node, right.node) {
                (Node::Number(left), Node::Number(right)) => {
                    Node::Truth(Truth::Compare(comparison(symbol), Box::new([left, right])))
                }
                (Node::Truth(left), Node::Truth(right)) => {
                    let equal = Truth::Equal(Box::new([left, right]));
                    Node::Truth(if symbol == "==" { equal } else { Truth::Not(Box::new(equal)) })
                }
                _ => {
                    let why =
                        format!("`{symbol}` compares two numbers or two conditions, not one with the other");
                    return Err(self.error(at, why));
                }
            },
            _ => {
                let why = format!("`{symbol}` compares numbers");
                let sides = Box::new([self.number(left, &why)?, self.number(right, &why)?]);
                Node::Truth(Truth::Compare(comparison(symbol), sides))
            }
        };
        // `!=` of conditions is two nodes.
        self.node(node, begin, depth + u32::from(symbol == "!="))
    }

    fn node(&self, node: Node, at: usize, depth: u32) -> Result<Typed, ExpressionError> {
        if depth >= MAX_EXPRESSION_DEPTH {
            return Err(self.too_deep());
        }
        Ok(Typed { node, at, depth: depth + 1 })
    }

    /// Everything that calls itself goes through here.
    fn nested<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, ExpressionError>,
    ) -> Result<T, ExpressionError> {
        if self.nesting >= MAX_EXPRESSION_DEPTH {
            return Err(self.too_deep());
        }
        self.nesting += 1;
        let result = inner(self)?;
        self.nesting -= 1;
        Ok(result)
    }

    fn number(&self, typed: Typed, why: &str) -> Result<Number, ExpressionError> {
        match typed.node {
            Node::Number(number) => Ok(number),
            Node::Truth(_) => Err(self.error(typed.at, format!("{why}; this is a condition"))),
        }
    }

    fn truth(&self, typed: Typed, why: &str) -> Result<Truth, ExpressionError> {
        match typed.node {
            Node::Truth(truth) => Ok(truth),
            Node::Number(_) => Err(self.error(typed.at, format!("{why}; this is a number"))),
        }
    }

    fn arity(
        &self,
        name: &str,
        at: usize,
        arguments: &[Typed],
        least: usize,
        most: usize,
    ) -> Result<(), ExpressionError> {
        if (least..=most).contains(&arguments.len()) {
            return Ok(());
        }
        let expected = match (least, most) {
            (1, 1) => "1 argument".to_owned(),
            _ if least == most => format!("{least} arguments"),
            _ => format!("at least {least} arguments"),
        };
        let why = format!("`{name}` takes {expected}, not {}", arguments.len());
        Err(self.error(at, why))
    }

    fn expect(&mut self, symbol: &'static str) -> Result<(), ExpressionError> {
        if self.token != Token::Symbol(symbol) {
            return Err(self.unexpected(&format!("an operator or `{symbol}`")));
        }
        self.next()
    }

    /// Reads the next token.
    fn next(&mut self) -> Result<(), ExpressionError> {
        let rest = self.text[self.end..].trim_start();
        self.start = self.text.len() - rest.len();
        let (token, len) = match rest.chars().next() {
            None => (Token::End, 0),
            Some(c) if c.is_ascii_digit() || c == '.' => {
                let len = number_len(rest);
                let number = rest[..len].parse();
                let why = || format!("`{}` is not a number", &rest[..len]);
                (Token::Number(number.map_err(|_| self.error(self.start, why()))?), len)
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
                let len = rest.find(ends).unwrap_or(rest.len());
                (Token::Name(&rest[..len]), len)
            }
            Some(c) => match SYMBOLS.iter().find(|&&symbol| rest.starts_with(symbol)) {
                Some(symbol) => (Token::Symbol(symbol), symbol.len()),
                None => {
                    let remedy = match c {
                        '=' => "; compare with `==`",
                        '|' => "; or is `||`",
                        '&' => "; and is `&&`",
                        _ => "",
                    };
                    return Err(self.error(self.start, format!("`{c}` has no meaning here{remedy}")));
                }
            },
        };
        self.token = token;
        self.end = self.start + len;
        Ok(())
    }

    fn unexpected(&self, expected: &str) -> ExpressionError {
        let found = match self.token {
            Token::End => "the end".to_owned(),
            _ => format!("`{}`", &self.text[self.start..self.end]),
        };
        self.error(self.start, format!("expected {expected}, found {found}"))
    }

    fn too_deep(&self) -> ExpressionError {
        self.error(
            self.start,
            format!("more than {MAX_EXPRESSION_DEPTH} levels of operators and parentheses"),
        )
    }

    fn error(&self, at: usize, why: impl Into<String>) -> ExpressionError {
        ExpressionError { at: self.text[..at].chars().count() + 1, why: why.into() }
    }
}

/// Bytes of the number that `text` begins with: digits and points, and an exponent.
fn number_len(text: &str) -> usize {
    let digits = |text: &str, also: char| {
        text.find(|c: char| !(c.is_ascii_digit() || c == also)).unwrap_or(text.len())
    };
    let mantissa = digits(text, '.');
    let rest = &text[mantissa..];
    let Some(exponent) = rest.strip_prefix(['e', 'E']) else { return mantissa };
    let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    match digits(unsigned, '0') {
        0 => mantissa,
        len => mantissa + (rest.len() - unsigned.len()) + len,
    }
}

fn precedence(symbol: &str) -> Option<u8> {
    Some(match symbol {
        "||" => 0,
        "&&" => 1,
        "==" | "!=" => 2,
        "<" | "<=" | ">" | ">=" => 3,
        "+" | "-" => 4,
        "*" | "/" | "%" => 5,
        _ => return None,
    })
}

fn arithmetic(symbol: &str) -> Arithmetic {
    match symbol {
        "+" => Arithmetic::Add,
        "-" => Arithmetic::Subtract,
        "*" => Arithmetic::Multiply,
        "/" => Arithmetic::Divide,
        _ => Arithmetic::Remainder,
    }
}

fn comparison(symbol: &str) -> Comparison {
    match symbol {
        "==" => Comparison::Equal,
        "!=" => Comparison::NotEqual,
        "<" => Comparison::Less,
        "<=" => Comparison::LessOrEqual,
        ">" => Comparison::Greater,
        _ => Comparison::GreaterOrEqual,
    }
}

fn variable(name: &str) -> Option<Variable> {
    Some(match name {
        "v_train" => Variable::VTrain,
        "n" => Variable::N,
        "count" => Variable::Count,
        "fastest" => Variable::Fastest,
        "slowest" => Variable::Slowest,
        "imbalance" => Variable::Imbalance,
        "progress" => Variable::Progress,
        "gap" => Variable::Gap,
        "staleness" => Variable::Staleness,
        "significance" => Variable::Significance,
        "coherence" => Variable::Coherence,
        "norm" => Variable::Norm,
        "held" => Variable::Held,
        "clock" => Variable::Clock,
        _ => return None,
    })
}
