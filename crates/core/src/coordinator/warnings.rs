//! Policies of the job's tables that train badly together, as sentences with their remedies.

use super::config::names;
use crate::policy::{Advice, Axis};
use crate::registry::Registry;
use crate::table::TableSpec;
use crate::types::{ServerId, TableId};
use crate::wire::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// A sentence for each combination of policies that some table has.
pub(super) fn warnings(plan: &Plan, registry: &Registry) -> Vec<String> {
    // There may be many tables, and few combinations.
    let mut sentences: BTreeMap<[String; 2], Option<String>> = BTreeMap::new();
    let mut concerned: BTreeMap<String, BTreeSet<TableId>> = BTreeMap::new();
    for server in servers_apart(plan) {
        for id in (0..plan.tables.len() as u32).map(TableId) {
            let policy = plan.policy_of(id, server);
            let texts = [Axis::Codec, Axis::Optimizer].map(|axis| policy.get(axis).to_owned());
            let sentence = sentences.entry(texts).or_insert_with(|| {
                let advice = Advice::on(&policy, registry)?;
                Some(format!("{}; take optimizer={}", advice.why, advice.optimizer))
            });
            if let Some(sentence) = sentence {
                concerned.entry(sentence.clone()).or_default().insert(id);
            }
        }
    }
    let told = |(sentence, tables): (String, BTreeSet<TableId>)| {
        if tables.len() == plan.tables.len() {
            return format!("all tables: {sentence}");
        }
        let tables: Vec<TableSpec> = tables.iter().map(|id| plan.tables[id.0 as usize].clone()).collect();
        format!("{}: {sentence}", names(&tables))
    };
    concerned.into_iter().map(told).collect()
}

/// Servers on which policies of a table may differ: those that an exception names, and the first.
fn servers_apart(plan: &Plan) -> BTreeSet<ServerId> {
    let switches = plan.switches.iter().map(|switch| &switch.rule);
    let named = plan.overrides.iter().chain(switches).filter_map(|rule| rule.server);
    std::iter::once(ServerId(0)).chain(named).collect()
}
