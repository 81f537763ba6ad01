//! The registry's entries, and the texts of chains.

use super::{axis, chains, codec};
use paramill_core::codec::Codec;
use paramill_core::spec::Spec;

#[test]
fn every_entry_is_described_and_its_example_has_it() {
    for entry in axis().entries() {
        assert!(entry.about.ends_with('.'), "{}: {}", entry.name, entry.about);
        let names: Vec<String> =
            entry.example.split('+').map(|stage| Spec::parse(stage).unwrap().name).collect();
        assert!(names.iter().any(|name| name == entry.name), "{}", entry.example);
        assert_eq!(codec(entry.example).to_string(), entry.example);
    }
}

#[test]
fn the_text_form_comes_back() {
    for chain in chains() {
        assert_eq!(codec(&chain).to_string(), chain);
    }
}

#[test]
fn an_unknown_parameter_is_refused_and_the_known_ones_are_listed() {
    let axis = axis();
    for entry in axis.entries() {
        let error = (entry.build)(&Spec::parse(&format!("{}:colour=blue", entry.name)).unwrap());
        let error = error.err().unwrap_or_else(|| panic!("{} takes a colour", entry.name)).to_string();
        assert!(error.contains("`colour`"), "{error}");
        for param in entry.params {
            assert!(error.contains(param.name), "{error} does not list {}", param.name);
        }
    }
}

#[test]
fn declared_defaults_are_the_real_ones() {
    let axis = axis();
    for entry in axis.entries() {
        let example = entry.example.split('+').map(|stage| Spec::parse(stage).unwrap());
        let given = example.into_iter().find(|spec| spec.name == entry.name).unwrap();
        let required: Vec<(String, String)> = entry
            .params
            .iter()
            .filter(|param| param.default.is_none())
            .map(|param| (param.name.to_owned(), given.params[0].1.clone()))
            .collect();
        let mut explicit = required.clone();
        explicit.extend(
            entry.params.iter().filter_map(|param| Some((param.name.to_owned(), param.default?.to_owned()))),
        );
        let build = |params| axis.build(&Spec { name: entry.name.into(), params });
        assert_eq!(format!("{:?}", build(required)), format!("{:?}", build(explicit)));
    }
}

#[test]
fn chains_that_make_no_sense_are_refused_with_the_reason() {
    for (text, reason) in [
        ("topk:0.01+dvf:delta=1e-3", "has a sparsifier already, `topk`"),
        ("f16+int8", "has a quantiser already"),
        ("lz4+zstd", "has a byte compressor already"),
        ("lz4+topk:0.01", "write `topk` to the left of `lz4`"),
        ("f16+topk:0.01", "write `topk` to the left of `f16`"),
        ("dvf:delta=1e-3,residual=false", "would be lost for good"),
        ("lossless+onebit", "`onebit` loses something"),
        ("lossless+topk:0.01+lz4", "`topk` loses something"),
        ("lossless+clip:1+lz4", "`clip` changes values"),
        ("ef+lz4", "there is no error"),
        ("ef+qsgd", "a residual of it would grow"),
        ("ef+terngrad", "a residual of it would grow"),
        ("ef+randk:0.1", "say `residual=true`"),
        ("topk:0.01,residual=false+onebit", "needs a residual"),
        ("topk:0.01+powersgd", "leave out `topk`"),
        ("powersgd+bitmap", "leave out `bitmap`"),
        ("powersgd+onebit", "take f16 or bf16"),
        ("topk:0", "expected 0 < ratio <= 1"),
        ("topk:1.5", "expected 0 < ratio <= 1"),
        ("topk:0.1,sample=0", "expected 0 < sample <= 1"),
        ("topk:0.1,select=sampled", "unknown field `select`"),
        ("threshold:-1", "expected value > 0"),
        ("dvf:delta=nan", "expected delta > 0"),
        ("dvf:low=1e-3", "expected delta, or low and up"),
        ("dvf:delta=1,low=1e-3,up=1", "expected delta, or low and up"),
        ("dvf:low=1,up=1e-3", "expected low < up"),
        ("dvf:low=1e-3,up=1,need=0", "expected 0.1 to 100000 Mbit/s"),
        ("dvf:delta=1,need=50", "give these two in place of delta"),
        ("qsgd:levels=0", "expected 1 to 127"),
        ("qsgd:bucket=7", "a multiple of 8"),
        ("zstd:99", "expected 1 to 19"),
        ("topk", "missing field `ratio`"),
        ("topk:0.1,ratio=0.2", "`ratio` is given twice"),
        ("topq:0.01", "unknown codec `topq`; known: f16, bf16"),
        ("", "a component name is expected"),
        ("f16+", "a component name is expected"),
    ] {
        let error =
            Codec::parse(&axis(), text).err().unwrap_or_else(|| panic!("{text} is taken")).to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}
