//! Layers: the tensors that a dense table consists of.

use super::TableSpec;
use crate::limits;
use crate::wire::bounded::sequence;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

/// One of several tensors that lie one after the other in a dense table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Unique in the job, among tables too; policies are matched by globs on it.
    pub name: String,
    /// First element in the table. Elements between two layers are padding, and belong to none.
    pub start: u64,
    /// Dimensions.
    #[serde(deserialize_with = "sequence::<_, _, { limits::MAX_DIMENSIONS }>")]
    pub shape: Vec<u64>,
}

impl Layer {
    /// Number of parameters; 0 when the product overflows, which [`TableSpec::check`] refuses.
    pub fn elements(&self) -> u64 {
        elements_of(&self.shape)
    }
}

/// A layer of either kind of table: of a pack, or a plain table as the only layer of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRef<'a> {
    /// Its name.
    pub name: &'a str,
    /// Dimensions.
    pub shape: &'a [u64],
    /// Its elements in the table.
    pub range: Range<usize>,
}

impl LayerRef<'_> {
    /// Elements in a row of the layer, seen as a matrix; 0 when it is none.
    pub fn columns(&self) -> usize {
        let rows = self.shape.first().copied().unwrap_or(1).max(1);
        if self.shape.len() > 1 { self.range.len() / rows as usize } else { 0 }
    }
}

/// Whether the layers of a pack lie in its table, one after the other.
pub(super) fn check_layers(spec: &TableSpec) -> Result<(), String> {
    let pack = &spec.name;
    if spec.layers.len() > limits::MAX_LAYERS {
        let (found, most) = (spec.layers.len(), limits::MAX_LAYERS);
        return Err(format!("table `{pack}` has {found} layers: expected at most {most}"));
    }
    if spec.is_pack() && (spec.rows || spec.shape.len() != 1) {
        return Err(format!(
            "table `{pack}` of shape {:?} has layers: expected a dense table of one dimension",
            spec.shape
        ));
    }
    let mut free = 0;
    for layer in &spec.layers {
        let Layer { name, start, shape } = layer;
        check_name("a layer", name).map_err(|why| format!("table `{pack}`: {why}"))?;
        check_shape("layer", name, shape)?;
        if *start < free || spec.elements().saturating_sub(*start) < layer.elements() {
            return Err(format!(
                "layer `{name}` of shape {shape:?} begins at element {start} of table `{pack}`: expected {free} or \
                 more, and {} elements from there on; the table has {}",
                layer.elements(),
                spec.elements()
            ));
        }
        free = start + layer.elements();
    }
    Ok(())
}

/// The first name that two tables, two layers, or a table and a layer have in common.
pub(crate) fn repeated_name<'a>(tables: &'a [TableSpec]) -> Option<&'a str> {
    let mut names = BTreeSet::new();
    let names_of = |table: &'a TableSpec| {
        std::iter::once(&table.name).chain(table.layers.iter().map(|layer| &layer.name))
    };
    tables.iter().flat_map(names_of).map(String::as_str).find(|name| !names.insert(*name))
}

/// Whether a name can be used. One that is too long is not repeated.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > limits::MAX_NAME_BYTES {
        let (found, most) = (name.len(), limits::MAX_NAME_BYTES);
        return Err(format!("{what} name of {found} bytes: expected 1 to {most}"));
    }
    Ok(())
}

/// Whether a table or a layer can have these dimensions.
pub(super) fn check_shape(what: &str, name: &str, shape: &[u64]) -> Result<(), String> {
    if shape.len() > limits::MAX_DIMENSIONS {
        let (found, most) = (shape.len(), limits::MAX_DIMENSIONS);
        return Err(format!("{what} `{name}` has {found} dimensions: expected at most {most}"));
    }
    let elements = elements_of(shape);
    if elements == 0 || elements > limits::MAX_TABLE_ELEMENTS {
        let most = limits::MAX_TABLE_ELEMENTS;
        return Err(format!("{what} `{name}` of shape {shape:?}: expected 1 to {most} elements"));
    }
    Ok(())
}

/// Number of elements of a shape; 0 when the product overflows.
pub(super) fn elements_of(shape: &[u64]) -> u64 {
    shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side)).unwrap_or(0)
}

/// Reads the tables of a job. Their number has a limit, and so has the number of layers in all of them together: one
/// takes tens of times more memory than bytes on the wire.
pub(crate) fn tables<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TableSpec>, D::Error> {
    deserializer.deserialize_seq(Tables)
}

struct Tables;

impl<'de> Visitor<'de> for Tables {
    type Value = Vec<TableSpec>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tables, layers) = (limits::MAX_TABLES, limits::MAX_LAYERS);
        write!(f, "at most {tables} tables, with at most {layers} layers in all")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<TableSpec>, A::Error> {
        let (mut taken, mut layers) = (Vec::new(), 0);
        while let Some(table) = items.next_element::<TableSpec>()? {
            layers += table.layers.len();
            if taken.len() == limits::MAX_TABLES {
                return Err(A::Error::invalid_length(limits::MAX_TABLES + 1, &self));
            }
            if layers > limits::MAX_LAYERS {
                return Err(A::Error::invalid_length(layers, &self));
            }
            taken.push(table);
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(name: &str, start: u64, shape: &[u64]) -> Layer {
        Layer { name: name.into(), start, shape: shape.to_vec() }
    }

    /// Two layers in a table of 40 elements, with padding behind each.
    fn pack() -> TableSpec {
        let layers = vec![layer("scale", 0, &[3, 4]), layer("shift", 16, &[20])];
        TableSpec { layers, ..TableSpec::dense("scale and 1 more", [40]) }
    }

    #[test]
    fn a_plain_table_is_its_own_layer_and_a_pack_has_several() {
        let matrix = TableSpec::dense("w", [6, 2, 5]);
        let layers: Vec<LayerRef<'_>> = matrix.layers().collect();
        assert_eq!(layers, [LayerRef { name: "w", shape: &[6, 2, 5], range: 0..60 }]);
        assert_eq!((layers[0].columns(), matrix.columns()), (10, 10));
        let pack = pack();
        assert_eq!(pack.check(), Ok(()));
        let layers: Vec<LayerRef<'_>> = pack.layers().collect();
        let scale = LayerRef { name: "scale", shape: &[3, 4], range: 0..12 };
        assert_eq!(layers, [scale, LayerRef { name: "shift", shape: &[20], range: 16..36 }]);
        assert_eq!(layers.iter().map(LayerRef::columns).collect::<Vec<_>>(), [4, 0]);
    }

    #[test]
    fn layers_that_do_not_fit_their_table_are_refused() {
        type Spoil = fn(&mut TableSpec);
        let cases: [(&str, Spoil); 10] = [
            ("begins at element 16", |pack| pack.layers[1].shape = vec![25]),
            ("begins at element 41", |pack| pack.layers[1].start = 41),
            ("begins at element 18446744073709551615", |pack| pack.layers[1].start = u64::MAX),
            ("begins at element 11 of table `scale and 1 more`: expected 12", |pack| {
                pack.layers[1].start = 11;
            }),
            ("expected 36 or more", |pack| pack.layers.swap(0, 1)),
            ("layer `scale` of shape [0]: expected 1 to", |pack| pack.layers[0].shape = vec![0]),
            ("17 dimensions", |pack| pack.layers[0].shape = vec![1; 17]),
            ("a layer name of 0 bytes", |pack| pack.layers[0].name.clear()),
            ("expected a dense table of one dimension", |pack| pack.shape = vec![20, 2]),
            ("expected a dense table of one dimension", |pack| pack.rows = true),
        ];
        for (expected, spoil) in cases {
            let mut pack = pack();
            spoil(&mut pack);
            let why = pack.check().unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn a_name_may_be_one_table_s_or_one_layer_s() {
        let plain = |name: &str| TableSpec::dense(name, [1]);
        assert_eq!(repeated_name(&[pack(), plain("w")]), None);
        assert_eq!(repeated_name(&[plain("w"), pack(), plain("w")]), Some("w"));
        assert_eq!(repeated_name(&[plain("shift"), pack()]), Some("shift"));
        assert_eq!(repeated_name(&[pack(), plain("scale and 1 more")]), Some("scale and 1 more"));
    }

    #[derive(Serialize, Deserialize)]
    struct Message {
        #[serde(deserialize_with = "tables")]
        tables: Vec<TableSpec>,
    }

    #[test]
    fn tables_of_a_peer_have_so_many_layers_in_all_and_not_one_more() {
        let of = |layers: usize| {
            let layers = (0..layers as u64).map(|at| layer("l", at, &[])).collect();
            TableSpec { layers, ..TableSpec::dense("pack", [1 << 20]) }
        };
        let read = |tables: Vec<TableSpec>| {
            let bytes = postcard::to_allocvec(&Message { tables }).unwrap();
            postcard::from_bytes::<Message>(&bytes).map(|message| message.tables.len())
        };
        let half = limits::MAX_LAYERS / 2;
        assert_eq!(read(vec![of(half), of(half), of(0)]), Ok(3));
        assert!(read(vec![of(half), of(half), of(1)]).is_err());
        assert!(read(vec![of(limits::MAX_LAYERS + 1)]).is_err());
        assert!(read(vec![of(0); limits::MAX_TABLES + 1]).is_err());
    }
}
