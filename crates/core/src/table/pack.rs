//! Division of small tensors into packs, which travel as one table each.

use super::{Layer, TableSpec};
use crate::limits;
use std::ops::Range;

/// Tensors that lie one after the other in one dense table.
///
/// Whatever its size, a table costs a worker and a shard as much as some thousand additions do: its requests, its
/// round, its acknowledgements. A pack pays that once. Its tensors are pushed and pulled together, under the policies
/// of one table, and are the table's layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Pack {
    spec: TableSpec,
    tensors: Vec<Packed>,
}

/// One tensor of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Its number among all that were divided.
    pub number: usize,
    /// Its elements in the table's gradient and in its values.
    pub place: Range<usize>,
}

impl Pack {
    /// Divides tensors into tables. Dense ones of at most `limit` elements share a table with the others that are alike;
    /// each of the rest is a table as it was declared,
    /// and so is one that is to stay alone. Tables come in the order of their first tensors.
    ///
    /// Only tensors with the same policies may be alike: those that a table declares itself, and those that the job has for its
    /// name ([`JobPolicies::are_alike`](crate::policy::JobPolicies::are_alike)). The coordinator refuses other packs.
    pub fn divide(
        tensors: impl IntoIterator<Item = TableSpec>,
        limit: u64,
        are_alike: impl Fn(&TableSpec, &TableSpec) -> bool,
    ) -> Vec<Pack> {
        let mut packs: Vec<Pack> = Vec::new();
        // The packs that take small tensors: one for each policy, and a new one when it is full.
        let mut open: Vec<usize> = Vec::new();
        for (number, tensor) in tensors.into_iter().enumerate() {
            if tensor.alone || tensor.rows || tensor.is_pack() || tensor.elements() > limit {
                packs.push(Pack::of(number, tensor));
                continue;
            }
            let place = open.iter().position(|&pack| are_alike(&packs[pack].spec, &tensor));
            match place.map(|place| open[place]) {
                Some(pack) if packs[pack].has_room_for(&tensor) => packs[pack].add(number, &tensor),
                _ => {
                    if let Some(place) = place {
                        open.swap_remove(place);
                    }
                    open.push(packs.len());
                    packs.push(Pack::of(number, tensor));
                }
            }
        }
        packs.iter_mut().for_each(Pack::say_how_many);
        packs
    }

    /// The table.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// Its tensors.
    pub fn tensors(&self) -> &[Packed] {
        &self.tensors
    }

    fn of(number: usize, tensor: TableSpec) -> Pack {
        let place = 0..tensor.elements() as usize;
        Pack { spec: tensor, tensors: vec![Packed { number, place }] }
    }

    fn has_room_for(&self, tensor: &TableSpec) -> bool {
        self.spec.elements() + tensor.elements() <= limits::MAX_TABLE_ELEMENTS
    }

    fn add(&mut self, number: usize, tensor: &TableSpec) {
        let start = self.spec.elements();
        let end = start + tensor.elements();
        if !self.spec.is_pack() {
            let first = Layer { name: self.spec.name.clone(), start: 0, shape: self.spec.shape.clone() };
            self.spec.layers.push(first);
        }
        self.tensors.push(Packed { number, place: start as usize..end as usize });
        self.spec.layers.push(Layer { name: tensor.name.clone(), start, shape: tensor.shape.clone() });
        self.spec.shape = vec![end];
    }

    fn say_how_many(&mut self) {
        let more = self.tensors.len() - 1;
        if more == 0 {
            return;
        }
        let suffix = format!(" and {more} more");
        let name = &mut self.spec.name;
        while name.len() + suffix.len() > limits::MAX_NAME_BYTES {
            name.pop();
        }
        name.push_str(&suffix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Axis, JobPolicies, Policies, Policy, PolicyOverride};
    use crate::registry::Registry;
    use crate::types::ServerId;

    fn same_policies(one: &TableSpec, other: &TableSpec) -> bool {
        one.policy == other.policy
    }

    fn names(packs: &[Pack]) -> Vec<&str> {
        packs.iter().map(|pack| pack.spec().name.as_str()).collect()
    }

    #[test]
    fn who_is_to_be_alone_is_and_nobody_else_hears_of_it() {
        let tensors = ["a", "b", "c"].map(|name| TableSpec::dense(name, [2]));
        let [a, b, c] = tensors.clone();
        assert_eq!(names(&Pack::divide([a, b.alone(), c], 2, same_policies)), ["a and 1 more", "b"]);
        let bytes = |spec: &TableSpec| postcard::to_allocvec(spec).unwrap();
        assert_eq!(bytes(&tensors[0].clone().alone()), bytes(&tensors[0]));
        assert_eq!(
            postcard::from_bytes::<TableSpec>(&bytes(&tensors[0].clone().alone())).unwrap(),
            tensors[0]
        );
    }

    #[test]
    fn small_tensors_share_a_table_and_others_keep_theirs() {
        let own = Policies::of([(Axis::Sync, "asp")]);
        let tensors = [
            TableSpec::dense("conv", [64, 3, 7, 7]),
            TableSpec::dense("scale", [64]),
            TableSpec { policy: own.clone(), ..TableSpec::dense("loose", [10]) },
            TableSpec::dense("shift", [8, 8]),
            TableSpec::sparse("rows", 4, 4),
            TableSpec { policy: own.clone(), ..TableSpec::dense("looser", [20]) },
            TableSpec::dense("scalar", []),
        ];
        let packs = Pack::divide(tensors.clone(), 64, same_policies);
        assert_eq!(names(&packs), ["conv", "scale and 2 more", "loose and 1 more", "rows"]);
        assert_eq!(packs[0].spec(), &tensors[0]);
        assert_eq!(packs[3].spec(), &tensors[4]);
        assert_eq!(packs[1].spec().shape, [129]);
        assert_eq!(packs[2].spec().policy, own);
        assert!(packs.iter().all(|pack| pack.spec().check().is_ok()));
        let layers: Vec<_> =
            packs[1].spec().layers().map(|layer| (layer.name, layer.shape, layer.range)).collect();
        assert_eq!(
            layers,
            [("scale", &[64][..], 0..64), ("shift", &[8, 8], 64..128), ("scalar", &[], 128..129)]
        );
        let places: Vec<_> = packs[1].tensors().iter().map(|packed| (packed.number, &packed.place)).collect();
        assert_eq!(places, [(1, &(0..64)), (3, &(64..128)), (6, &(128..129))]);
    }

    #[test]
    fn tensors_that_the_job_has_other_policies_for_are_packed_apart() {
        let registry = Registry::builtin();
        let rule = |table: &str| PolicyOverride::new(table, Policies::of([(Axis::Sync, "asp")]));
        let on_one = |table: &str| rule(table).on(ServerId(3));
        let tensors =
            ["conv.bias", "conv.scale", "fc.bias", "fc.scale"].map(|name| TableSpec::dense(name, [4]));
        for (overrides, expected) in [
            (vec![], &["conv.bias and 3 more"][..]),
            (vec![rule("*.bias")], &["conv.bias and 1 more", "conv.scale and 1 more"]),
            (vec![on_one("fc*")], &["conv.bias and 1 more", "fc.bias and 1 more"]),
            (vec![rule("fc*"), rule("conv*")], &["conv.bias and 3 more"]),
        ] {
            let job = JobPolicies { policy: Policy::default(), overrides };
            let packs = Pack::divide(tensors.clone(), 4, |one, other| job.are_alike(&registry, one, other));
            assert_eq!(names(&packs), expected);
        }
    }

    #[test]
    fn tensors_that_a_codec_leaves_alone_are_packed_apart() {
        let registry = Registry::builtin();
        let tensors = [("a", 4), ("b", 100), ("c", 5), ("d", 99), ("e", 101)]
            .map(|(name, size)| TableSpec::dense(name, [size]));
        for axis in [Axis::Codec, Axis::AnswerCodec] {
            for (codec, expected) in [
                ("int8", &["a and 4 more"][..]),
                ("min-size:100+int8", &["a and 2 more", "b and 1 more"]),
                ("min-size:5+f16", &["a", "b and 3 more"]),
            ] {
                let policy = Policy::default().with(axis, codec);
                let job = JobPolicies { policy, overrides: vec![] };
                let packs =
                    Pack::divide(tensors.clone(), 1000, |one, other| job.are_alike(&registry, one, other));
                assert_eq!(names(&packs), expected, "{axis} {codec}");
            }
        }
    }

    #[test]
    fn without_a_limit_every_tensor_is_a_table() {
        let tensors: Vec<TableSpec> = (0..5).map(|n| TableSpec::dense(format!("t{n}"), [3])).collect();
        let packs = Pack::divide(tensors.clone(), 0, same_policies);
        assert!(packs.iter().map(Pack::spec).eq(&tensors));
    }

    #[test]
    fn a_pack_is_never_larger_than_a_table_may_be_and_its_name_never_longer() {
        let half = limits::MAX_TABLE_ELEMENTS / 2 + 1;
        let long = "ü".repeat(limits::MAX_NAME_BYTES / 2);
        let tensors = (0..4).map(|n| TableSpec::dense(format!("{n}"), [half]));
        assert_eq!(Pack::divide(tensors, u64::MAX, same_policies).len(), 4);
        let two = [TableSpec::dense(long, [1]), TableSpec::dense("b", [1])];
        let packs = Pack::divide(two, 1, same_policies);
        assert_eq!(packs.len(), 1);
        assert!(packs[0].spec().name.ends_with("ü and 1 more"));
        assert_eq!(packs[0].spec().check(), Ok(()));
    }
}
