//! `paramill components`: everything that can be named, as the registry knows it.

use crate::args::ComponentsArgs;
use crate::failure::{Failure, OrUsage};
use crate::output::{Align, Output, Table};
use anyhow::{Result, anyhow};
use paramill_core::registry::{Axis, Param, Registry};
use serde::Serialize;

/// Lists all components, or those of one name.
pub(crate) fn run(args: &ComponentsArgs, registry: &Registry, output: &Output) -> Result<(), Failure> {
    let catalogue = Catalogue::of(registry);
    let chosen = match &args.name {
        None => catalogue,
        Some(name) => catalogue.only(name).or_usage()?,
    };
    if output.json() {
        return Ok(output.object(&chosen)?);
    }
    for (index, axis) in chosen.axes.iter().enumerate() {
        if index > 0 {
            output.text("")?;
        }
        if args.name.is_some() && axis.components.len() == 1 {
            print_in_full(axis, &axis.components[0], output)?
        } else {
            print_axis(axis, output)?
        }
    }
    if args.name.is_none() {
        output.text("\n`paramill components NAME` shows one in full.")?;
    }
    Ok(())
}

/// What can be named.
#[derive(Debug, Serialize)]
struct Catalogue {
    axes: Vec<AxisText>,
}

#[derive(Debug, Serialize)]
struct AxisText {
    /// The option that takes a component of this axis, without the dashes.
    option: &'static str,
    axis: &'static str,
    /// Parameters that every component of the axis takes.
    common: Vec<ParamText>,
    components: Vec<Component>,
}

#[derive(Debug, Serialize)]
struct Component {
    name: &'static str,
    about: &'static str,
    example: &'static str,
    params: Vec<ParamText>,
}

#[derive(Debug, Serialize)]
struct ParamText {
    name: &'static str,
    /// `null` when it must be given.
    default: Option<&'static str>,
    about: &'static str,
}

impl Catalogue {
    fn of(registry: &Registry) -> Catalogue {
        Catalogue {
            axes: vec![
                AxisText::of("sync", &registry.consistency),
                AxisText::of("placement", &registry.placement),
                AxisText::of("optimizer", &registry.optimizer),
                AxisText::of("codec", &registry.codec),
                AxisText::of("broadcast", &registry.broadcast),
                AxisText::of("hold", &registry.hold),
            ],
        }
    }

    /// Only the components of this name, or a whole axis.
    fn only(self, name: &str) -> Result<Catalogue> {
        let known: Vec<&str> = self
            .axes
            .iter()
            .flat_map(|axis| axis.components.iter().map(|component| component.name))
            .collect();
        let unknown = anyhow!("unknown component `{name}`; known: {}", known.join(", "));
        let mut axes = self.axes;
        for axis in &mut axes {
            if axis.option != name && axis.axis != name {
                axis.components.retain(|component| component.name == name);
            }
        }
        axes.retain(|axis| !axis.components.is_empty());
        if axes.is_empty() { Err(unknown) } else { Ok(Catalogue { axes }) }
    }
}

impl AxisText {
    fn of<T: ?Sized>(option: &'static str, axis: &Axis<T>) -> AxisText {
        let component = |entry: &paramill_core::registry::Entry<T>| Component {
            name: entry.name,
            about: entry.about,
            example: entry.example,
            params: params(entry.params),
        };
        AxisText {
            option,
            axis: axis.name,
            common: params(axis.common),
            components: axis.entries().iter().map(component).collect(),
        }
    }
}

fn params(params: &[Param]) -> Vec<ParamText> {
    let text = |param: &Param| ParamText { name: param.name, default: param.default, about: param.about };
    params.iter().map(text).collect()
}

fn print_axis(axis: &AxisText, output: &Output) -> Result<(), Failure> {
    output.text(format!("{} (--{})", sentence_case(axis.axis), axis.option))?;
    let mut table = Table::new([
        ("name", Align::Left),
        ("parameters", Align::Left),
        ("example", Align::Left),
        ("what it does", Align::Left),
    ]);
    for component in &axis.components {
        let params: Vec<String> = component.params.iter().map(short_form).collect();
        table.row([component.name, &params.join(", "), component.example, component.about]);
    }
    output.table(&table)?;
    if !axis.common.is_empty() {
        let common: Vec<String> = axis.common.iter().map(short_form).collect();
        output.text(format!("every one also takes: {}", common.join(", ")))?;
    }
    Ok(())
}

fn print_in_full(axis: &AxisText, component: &Component, output: &Output) -> Result<(), Failure> {
    output.text(format!("{} ({}): {}", component.name, axis.axis, component.about))?;
    output.text(format!("example: --{} '{}'", axis.option, component.example))?;
    let is_own = |common: &&ParamText| component.params.iter().any(|own| own.name == common.name);
    let common = axis.common.iter().filter(|common| !is_own(common));
    let all: Vec<&ParamText> = component.params.iter().chain(common).collect();
    if all.is_empty() {
        output.text("It takes no parameters.")?;
        return Ok(());
    }
    output.text("")?;
    let mut table =
        Table::new([("parameter", Align::Left), ("default", Align::Left), ("meaning", Align::Left)]);
    for param in all {
        table.row([param.name, param.default.unwrap_or("(must be given)"), param.about]);
    }
    Ok(output.table(&table)?)
}

/// `s` when it must be given, `c=0.5` when that is the default.
fn short_form(param: &ParamText) -> String {
    match param.default {
        Some(default) => format!("{}={default}", param.name),
        None => param.name.to_owned(),
    }
}

fn sentence_case(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}
