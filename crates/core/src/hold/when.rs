//! A criterion of the user's own, as an expression.

use super::{Criterion, UpdateView};
use crate::expression::{Condition, Scope};
use crate::registry::{Entry, Param};
use crate::spec::{Spec, SpecError};
use serde::Deserialize;

pub(super) const ENTRY: Entry<dyn Criterion> = Entry {
    name: "when",
    about: "An update is held back while a condition of your own holds.",
    params: &[Param {
        name: "condition",
        default: None,
        about: "Variables: significance (|u|/|w|), coherence (|u|^2 over the sum of |g|^2 of its gradients), norm (|u|), held (pushes \
                since the one that its oldest gradient was meant for), clock (the iteration). Functions: min max abs exp sqrt floor if(condition, a, b). May be \
                given without a name.",
    }],
    example: "when:significance < 0.1 / sqrt(clock + 1),most=4",
    build,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    condition: String,
}

#[derive(Debug)]
struct When {
    condition: Condition,
}

fn build(spec: &Spec) -> Result<Box<dyn Criterion>, SpecError> {
    let Config { condition: text } = spec.with_positional("condition")?.config()?;
    let condition = Condition::parse(&text, Scope::Hold)
        .map_err(|error| spec.parameter_error(format!("in the condition `{text}`, {error}")))?;
    Ok(Box::new(When { condition }))
}

impl Criterion for When {
    fn holds(&self, update: &UpdateView) -> bool {
        self.condition.holds_for_update(update)
    }

    fn needs_parameters(&self) -> bool {
        self.condition.uses_significance()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expression::{FUNCTIONS, UPDATE_VARIABLES};

    #[test]
    fn the_manual_names_everything_that_can_be_used() {
        let about = ENTRY.params[0].about;
        let functions = FUNCTIONS.iter().filter(|(name, _)| *name != "rand()");
        for (name, _) in UPDATE_VARIABLES.iter().chain(functions) {
            assert!(about.contains(name.split('(').next().unwrap()), "{name}");
        }
    }
}
