//! Where everything is, worked out from the scenario and not asked from the roles.

use crate::rule::FrameView;
use crate::scenario::{Scenario, ScenarioError};
use paramill_core::placement::place_tables;
use paramill_core::policy::Axis;
use paramill_core::registry::Registry;
use paramill_core::spec::Spec;
use paramill_core::table::{Chunk, TableSpec, chunks};
use paramill_core::types::TableId;
use paramill_core::wire::{Flags, Kind};

#[derive(Debug)]
pub(super) struct Layout {
    pub(super) tables: Vec<TableSpec>,
    chunks: Vec<Vec<Chunk>>,
}

impl Layout {
    pub(super) fn new(scenario: &Scenario) -> Result<Layout, ScenarioError> {
        let (tables, registry) = (scenario.table_specs(), Registry::builtin());
        let placement = Spec::parse(scenario.policy.get(Axis::Placement))
            .and_then(|spec| registry.placement.build(&spec))
            .map_err(|error| ScenarioError::Value(error.to_string()))?;
        let whole = scenario.job_config("checked").whole_tables(&registry, &tables);
        let parts = place_tables(&*placement, &tables, &whole, scenario.servers);
        let cores = vec![scenario.cores; scenario.servers as usize];
        let chunks = chunks(&tables, &parts, &whole, &cores, &scenario.policy);
        Ok(Layout { tables, chunks })
    }

    pub(super) fn table(&self, table: TableId) -> &TableSpec {
        &self.tables[table.0 as usize]
    }

    /// The chunks of a table.
    pub(super) fn chunks(&self, table: TableId) -> &[Chunk] {
        &self.chunks[table.0 as usize]
    }

    /// The parameters that a frame brings, with the number of the first one, when it brings a whole chunk.
    pub(super) fn parameters<'a>(
        &self,
        frame: &FrameView<'a>,
    ) -> Option<(u64, impl Iterator<Item = f32> + 'a)> {
        let header = frame.header;
        let is_other = [Flags::ROWS, Flags::ENCODED].iter().any(|flag| header.flags.has(*flag));
        if header.kind != Kind::Params || is_other {
            return None;
        }
        let chunk = self.chunks.get(header.table.0 as usize)?.get(header.chunk as usize)?;
        let value = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Some((chunk.start, frame.payload.chunks_exact(4).map(value)))
    }
}
