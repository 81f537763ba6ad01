//! Policies in files and on the wire: a map from axis to text. An override has `table` and `server` in the same map.

use super::{Axis, Policies, Policy, PolicyOverride};
use crate::types::ServerId;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::fmt;

impl Serialize for Policies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(axis, text)| (axis.info().name, text)))
    }
}

impl<'de> Deserialize<'de> for Policies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Policies, D::Error> {
        let in_words = deserializer.is_human_readable();
        deserializer.deserialize_map(Texts { in_words })
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// Axes that nothing is said about have their defaults.
impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Policy, D::Error> {
        Ok(Policy::default().under(Policies::deserialize(deserializer)?))
    }
}

impl Serialize for PolicyOverride {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let len = 1 + usize::from(self.server.is_some()) + self.policies.0.len();
        let mut map = serializer.serialize_map(Some(len))?;
        map.serialize_entry("table", &self.table)?;
        if let Some(server) = &self.server {
            map.serialize_entry("server", server)?;
        }
        for (axis, text) in self.policies.iter() {
            map.serialize_entry(axis.info().name, text)?;
        }
        map.end()
    }
}

/// Without a `table` it is about all of them.
impl<'de> Deserialize<'de> for PolicyOverride {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PolicyOverride, D::Error> {
        let in_words = deserializer.is_human_readable();
        deserializer.deserialize_map(Rule { in_words })
    }
}

struct Texts {
    in_words: bool,
}

impl<'de> Visitor<'de> for Texts {
    type Value = Policies;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("policies, each with its text")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Policies, A::Error> {
        let mut policies = Policies::default();
        while let Some(axis) = entries.next_key_seed(AxisName)? {
            let text = entries.next_value_seed(TextOf { axis, in_words: self.in_words })?;
            put(&mut policies, axis, text)?;
        }
        Ok(policies)
    }
}

fn put<E: Error>(policies: &mut Policies, axis: Axis, text: String) -> Result<(), E> {
    match policies.0.insert(axis, text) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(axis.info().name)),
    }
}

struct Rule {
    in_words: bool,
}

impl<'de> Visitor<'de> for Rule {
    type Value = PolicyOverride;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a glob on tables, and policies, each with its text")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<PolicyOverride, A::Error> {
        let (mut table, mut server, mut policies) = (None::<String>, None::<ServerId>, Policies::default());
        while let Some(key) = entries.next_key::<RuleKey>()? {
            match key {
                RuleKey::Table if table.is_some() => return Err(A::Error::duplicate_field("table")),
                RuleKey::Table => table = Some(entries.next_value()?),
                RuleKey::Server if server.is_some() => return Err(A::Error::duplicate_field("server")),
                RuleKey::Server => server = Some(entries.next_value()?),
                RuleKey::Axis(axis) => {
                    let text = entries.next_value_seed(TextOf { axis, in_words: self.in_words })?;
                    put(&mut policies, axis, text)?;
                }
            }
        }
        Ok(PolicyOverride { table: table.unwrap_or_else(|| "*".into()), server, policies })
    }
}

/// The name of an axis.
struct AxisName;

impl<'de> DeserializeSeed<'de> for AxisName {
    type Value = Axis;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Axis, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for AxisName {
    type Value = Axis;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a policy")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Axis, E> {
        Axis::named(name).map_err(E::custom)
    }
}

enum RuleKey {
    Table,
    Server,
    Axis(Axis),
}

impl<'de> Deserialize<'de> for RuleKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RuleKey, D::Error> {
        struct Names;
        impl Visitor<'_> for Names {
            type Value = RuleKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`table`, `server`, or the name of a policy")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<RuleKey, E> {
                match name {
                    "table" => Ok(RuleKey::Table),
                    "server" => Ok(RuleKey::Server),
                    other => AxisName.visit_str(other).map(RuleKey::Axis),
                }
            }
        }
        deserializer.deserialize_str(Names)
    }
}

/// The text of an axis. In a file a number may stand there without quotes.
struct TextOf {
    axis: Axis,
    in_words: bool,
}

impl<'de> DeserializeSeed<'de> for TextOf {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        match self.in_words {
            true => deserializer.deserialize_any(self),
            false => deserializer.deserialize_str(self),
        }
    }
}

impl Visitor<'_> for TextOf {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the text of `{}`", self.axis)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        self.axis.check_text(text).map_err(E::custom)?;
        Ok(text.to_owned())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<String, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<String, E> {
        self.visit_str(&number.to_string())
    }
}
