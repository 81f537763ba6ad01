use super::*;
use serde::{Deserialize, Serialize};

fn told(texts: &[(Axis, &str)]) -> Policies {
    Policies::of(texts.iter().copied())
}

#[test]
fn the_list_is_in_the_order_of_the_axes_and_its_defaults_mean_something() {
    let registry = Registry::builtin();
    for (number, info) in AXES.iter().enumerate() {
        assert_eq!(info.axis as usize, number, "{}", info.name);
        assert_eq!(Axis::named(info.name), Ok(info.axis));
        assert_eq!(info.axis.check(&registry, info.default), Ok(()), "{}", info.name);
        assert!(info.about.len() > 10 && !info.about.ends_with('.'), "{}", info.name);
    }
    assert_eq!(Policy::default().check(&registry), Ok(()));
    assert!(Policy::default().changed().is_empty());
}

#[test]
fn a_name_that_is_none_answers_with_those_that_exist() {
    let known = "known: sync, placement, optimizer, codec, answer_codec, broadcast, reduce, order, nonfinite, chunk, local, priority, hold";
    for typed in ["snyc=asp", "=asp", "Sync=asp"] {
        let error = Policies::parse([typed]).unwrap_err().to_string();
        assert!(error.starts_with("unknown policy `") && error.contains(known), "{error}");
    }
    let error = toml::from_str::<PolicyOverride>("table = '*'\ncdoec = 'none'").unwrap_err();
    assert!(error.to_string().contains(known), "{error}");
}

#[test]
fn what_is_typed_is_read_or_refused_with_what_was_expected() {
    let typed = Policies::parse(["sync=ssp:s=3,exec=soft", "order = ranked"]).unwrap();
    assert_eq!(typed, told(&[(Axis::Sync, "ssp:s=3,exec=soft"), (Axis::Order, "ranked")]));
    assert_eq!(typed.to_string(), "sync=ssp:s=3,exec=soft, order=ranked");
    for (texts, expected) in [
        (vec!["sync"], "cannot read `sync`: expected AXIS=TEXT"),
        (vec!["sync=asp", "sync=bsp"], "`sync` is given twice"),
        (vec!["order=any"], "order: `any`: expected `arrival` or `ranked`"),
        (vec!["chunk=0"], "chunk: `0`: expected 4B to 2MB in steps of 4 bytes"),
        (vec!["chunk=3MB"], "expected 4B to 2MB"),
        (vec!["chunk=10B"], "in steps of 4 bytes"),
        (vec!["chunk=-4KB"], "such as 4KB, 32KB or 1MB"),
        (vec!["chunk=18446744073709551615MB"], "expected 4B to 2MB"),
        (vec!["chunk=KB"], "expected 4B to 2MB"),
    ] {
        let error = Policies::parse(texts.clone()).unwrap_err().to_string();
        assert!(error.contains(expected), "{texts:?}: {error}");
    }
    let long = "s".repeat(limits::MAX_POLICY_BYTES + 1);
    let error = Policies::default().set(Axis::Sync, long).unwrap_err().to_string();
    assert!(error.contains("more than 4096 bytes") && error.len() < 100, "{error}");
    let unknown = told(&[(Axis::Sync, "spp")]).check(&Registry::builtin()).unwrap_err().to_string();
    assert!(unknown.starts_with("unknown consistency model `spp`; known: bsp"), "{unknown}");
}

#[test]
fn a_chunk_is_said_in_bytes_and_counted_in_parameters() {
    for (text, elements) in [
        ("32KB", 8192),
        ("4KB", 1024),
        ("1MB", 1 << 18),
        ("2MB", limits::MAX_DATA_ELEMENTS),
        ("64B", 16),
        ("4096", 1024),
    ] {
        assert_eq!(Policy::default().with(Axis::Chunk, text).chunk_elements(), elements, "{text}");
    }
    assert_eq!(Policy::default().chunk_elements(), limits::BLOCK_ELEMENTS);
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct File {
    policy: Policy,
    rules: Vec<PolicyOverride>,
}

#[test]
fn files_and_the_wire_say_the_same() {
    let text = "policy = { sync = 'asp', chunk = 4096 }\nrules = [\n{ codec = 'none', table = '*.bias' },\n\
                { table = 'w', server = 2, sync = 'ssp:s=3', reduce = 'sum' }]\n";
    let file: File = toml::from_str(text).unwrap();
    assert_eq!(file.policy, Policy::default().with(Axis::Sync, "asp").with(Axis::Chunk, "4096"));
    assert_eq!(file.rules[0], PolicyOverride::new("*.bias", told(&[(Axis::Codec, "none")])));
    let told = told(&[(Axis::Sync, "ssp:s=3"), (Axis::Reduce, "sum")]);
    assert_eq!(file.rules[1], PolicyOverride::new("w", told).on(ServerId(2)));
    let again = toml::to_string(&file).unwrap();
    assert_eq!(toml::from_str::<File>(&again).unwrap(), file, "{again}");
    let bytes = postcard::to_allocvec(&file).unwrap();
    assert_eq!(postcard::from_bytes::<File>(&bytes).unwrap(), file);
    for wrong in [
        "order = 'any'",
        "sync = 'asp'\nsync = 'bsp'",
        "sync = true",
        "table = 'a'\ntable = 'b'",
        "server = -1",
    ] {
        assert!(toml::from_str::<PolicyOverride>(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn later_overrides_win_and_a_server_can_be_named() {
    let rules = [
        PolicyOverride::new("*", told(&[(Axis::Sync, "asp"), (Axis::Reduce, "sum")])),
        PolicyOverride::new("w", told(&[(Axis::Sync, "ssp:s=3")])).on(ServerId(1)),
    ];
    let resolved =
        |table, server| PolicyOverride::resolve(Policy::default(), &rules, table, ServerId(server));
    let sync = |table, server| resolved(table, server).get(Axis::Sync).to_owned();
    assert_eq!((sync("w", 0), sync("w", 1), sync("v", 1)), ("asp".into(), "ssp:s=3".into(), "asp".into()));
    assert_eq!(resolved("w", 1).reduce(), Reduce::Sum, "what the later one does not name stays");
    assert_eq!(resolved("w", 1).changed(), told(&[(Axis::Sync, "ssp:s=3"), (Axis::Reduce, "sum")]));
}

#[test]
fn an_override_names_what_is_a_tables_or_a_servers_own() {
    for (axis, server, expected) in [
        (Axis::Chunk, None, "chunk: it is the same for the whole job"),
        (Axis::Placement, None, "placement: it is the same for the whole job"),
        (
            Axis::Codec,
            Some(ServerId(0)),
            "codec: it is the same on all servers of a table: leave out `server`",
        ),
    ] {
        let rule = PolicyOverride::new("*", told(&[(axis, axis.info().default)])).on(server);
        assert_eq!(rule.check().unwrap_err().to_string(), expected);
    }
    let rule = |texts: &[(Axis, &str)]| PolicyOverride::new("*", told(texts));
    assert_eq!(rule(&[(Axis::Codec, "f16")]).check(), Ok(()));
    assert_eq!(rule(&[(Axis::Sync, "asp")]).on(ServerId(0)).check(), Ok(()));
    let long = PolicyOverride::new("n".repeat(limits::MAX_NAME_BYTES + 1), Policies::default());
    assert!(long.check().unwrap_err().to_string().contains("its glob has more than 256 bytes"));
}

/// A switch takes the place of an earlier one of which nothing is left, and of nothing else.
#[test]
fn an_override_is_replaced_by_one_that_says_all_of_it_again() {
    let old = PolicyOverride::new("*", told(&[(Axis::Sync, "asp")])).on(ServerId(1));
    let with = |texts| PolicyOverride { policies: told(texts), ..old.clone() };
    assert!(old.is_replaced_by(&with(&[(Axis::Sync, "bsp")])));
    assert!(old.is_replaced_by(&with(&[(Axis::Codec, "f16"), (Axis::Sync, "bsp")])));
    assert!(
        !with(&[(Axis::Codec, "f16"), (Axis::Sync, "asp")]).is_replaced_by(&with(&[(Axis::Sync, "bsp")]))
    );
    assert!(!old.is_replaced_by(&with(&[(Axis::Optimizer, "sgd")])));
    assert!(!old.is_replaced_by(&PolicyOverride { server: None, ..old.clone() }));
    assert!(!old.is_replaced_by(&PolicyOverride { table: "w".into(), ..old.clone() }));
}
