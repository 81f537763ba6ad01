//! The state in etcd, where another host finds it and takes over.
//!
//! The one that coordinates holds a key under a lease; every state is written on the condition that it still does. etcd's JSON gateway is
//! spoken, over HTTP/1.0 with one request a connection: a state is written when members change, seldom enough that the simplest client is
//! the best one.

mod base64;
mod http;

use super::{StateError, StateStore};
use http::post;
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;

/// Seconds after which a coordinator that is not heard of is gone.
const LEASE_SECONDS: u64 = 5;

/// A prefix of keys in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdPlace {
    /// `host:port` of its members.
    endpoints: Vec<String>,
    prefix: String,
}

impl FromStr for EtcdPlace {
    type Err = StateError;

    /// Reads what follows `etcd://`.
    fn from_str(text: &str) -> Result<EtcdPlace, StateError> {
        let fail = || StateError(format!("`etcd://{text}`: expected etcd://HOST:PORT[,HOST:PORT]/PREFIX"));
        let (hosts, prefix) = text.split_once('/').ok_or_else(fail)?;
        let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        if prefix.is_empty() || endpoints.iter().any(String::is_empty) {
            return Err(fail());
        }
        Ok(EtcdPlace { endpoints, prefix: prefix.trim_end_matches('/').to_owned() })
    }
}

impl fmt::Display for EtcdPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd://{}/{}", self.endpoints.join(","), self.prefix)
    }
}

impl EtcdPlace {
    /// Its first member and the prefix, as one address without commas.
    pub(crate) fn name(&self) -> String {
        format!("etcd://{}/{}", self.endpoints[0], self.prefix)
    }

    /// The state of the job, if one is stored. Whoever would coordinate the job asks first: an address that is wrong is an error here.
    pub(crate) fn peek(&self) -> Result<Option<Vec<u8>>, StateError> {
        EtcdStore::new(self, "").load()
    }

    /// A process that is reached at this address would coordinate the job.
    pub(crate) fn candidacy(&self, address: &str) -> Candidacy {
        Candidacy { place: self.clone(), store: EtcdStore::new(self, address), has_seen_state: false }
    }
}

/// A process that would coordinate the job.
#[derive(Debug)]
pub(crate) struct Candidacy {
    place: EtcdPlace,
    store: EtcdStore,
    /// Another process has coordinated the job, and stored its state.
    has_seen_state: bool,
}

/// How a process stands in the election.
#[derive(Debug)]
pub(crate) enum Standing {
    /// It coordinates the job from now on, beginning with this state.
    Leads(EtcdStore, Option<Vec<u8>>),
    /// Another process does, at this address.
    Follows(String),
    /// The job has ended: its state was there, and was removed.
    Over,
}

impl Candidacy {
    /// Takes the job over if no process coordinates it. To be called several times in the time of a lease.
    pub(crate) fn stand(&mut self) -> Result<Standing, StateError> {
        if let Some(other) = self.store.try_to_lead(None)? {
            self.has_seen_state |= other.has_state;
            return Ok(Standing::Follows(other.address));
        }
        let state = self.store.load()?;
        let store = std::mem::replace(&mut self.store, EtcdStore::new(&self.place, ""));
        self.store.address.clone_from(&store.address);
        if state.is_none() && self.has_seen_state {
            store.resign()?;
            return Ok(Standing::Over);
        }
        Ok(Standing::Leads(store, state))
    }
}

/// The process that coordinates the job.
#[derive(Debug)]
struct Leader {
    address: String,
    has_state: bool,
}

/// The state of a job that this process coordinates.
#[derive(Debug)]
pub(crate) struct EtcdStore {
    place: EtcdPlace,
    address: String,
    lease: String,
    /// The revision at which this process began to lead.
    leads_since: String,
    /// The revision of the state that this process has read or written last; 0 for none.
    written: String,
}

impl EtcdStore {
    fn new(place: &EtcdPlace, address: &str) -> EtcdStore {
        EtcdStore {
            place: place.clone(),
            address: address.to_owned(),
            lease: String::new(),
            leads_since: String::new(),
            written: "0".into(),
        }
    }

    /// Leaves the place to another process at once.
    fn resign(&self) -> Result<(), StateError> {
        self.ask("lease/revoke", &json!({ "ID": self.lease })).map(|_| ())
    }

    fn key(&self, name: &str) -> String {
        base64::encode(format!("{}/{name}", self.place.prefix).as_bytes())
    }

    /// Asks one member after the other.
    fn ask(&self, method: &str, body: &Value) -> Result<Value, StateError> {
        let mut why = String::new();
        for endpoint in &self.place.endpoints {
            match post(endpoint, &format!("/v3/{method}"), &body.to_string()) {
                Ok(text) => {
                    let answer = serde_json::from_str(&text);
                    return answer.map_err(|error| StateError(format!("etcd at {endpoint}: {error}")));
                }
                Err(error) => why = format!("etcd at {endpoint}: {error}"),
            }
        }
        Err(StateError(why))
    }

    /// Becomes the one that leads, if nobody does and the state is at this revision, if one is given. Else who leads.
    fn try_to_lead(&mut self, state_at: Option<&str>) -> Result<Option<Leader>, StateError> {
        if self.lease.is_empty() || !self.keep_alive()? {
            let granted = self.ask("lease/grant", &json!({ "TTL": LEASE_SECONDS }))?;
            self.lease = text(&granted["ID"]);
        }
        let leader = self.key("leader");
        let mut compare = vec![json!({ "key": leader, "target": "CREATE", "create_revision": "0" })];
        compare.extend(state_at.map(|revision| self.state_is_at(revision)));
        let put =
            json!({ "key": leader, "value": base64::encode(self.address.as_bytes()), "lease": self.lease });
        let get = json!({ "key": leader });
        let look = json!({ "key": self.key("state"), "count_only": true });
        let answer = self.ask(
            "kv/txn",
            &json!({
                "compare": compare,
                "success": [{ "request_put": put }],
                "failure": [{ "request_range": get }, { "request_range": look }],
            }),
        )?;
        if answer["succeeded"] == json!(true) {
            self.leads_since = text(&answer["header"]["revision"]);
            return Ok(None);
        }
        let found = &answer["responses"][0]["response_range"]["kvs"][0];
        if text(&found["lease"]) == self.lease {
            // The answer to an earlier attempt was lost.
            self.leads_since = text(&found["create_revision"]);
            return Ok(None);
        }
        let other = found["value"].as_str().and_then(base64::decode).unwrap_or_default();
        let states = text(&answer["responses"][1]["response_range"]["count"]);
        Ok(Some(Leader { address: String::from_utf8_lossy(&other).into_owned(), has_state: states == "1" }))
    }

    fn state_is_at(&self, revision: &str) -> Value {
        json!({ "key": self.key("state"), "target": "MOD", "mod_revision": revision })
    }

    /// Whether the lease still runs; it begins anew then.
    fn keep_alive(&self) -> Result<bool, StateError> {
        let kept = self.ask("lease/keepalive", &json!({ "ID": self.lease }))?;
        Ok(text(&kept["result"]["TTL"]).parse::<i64>().unwrap_or(0) > 0)
    }

    /// Changes the state on the condition that this process leads.
    fn change(&mut self, request: Value) -> Result<(), StateError> {
        let leads =
            json!({ "key": self.key("leader"), "target": "CREATE", "create_revision": self.leads_since });
        let answer = self.ask("kv/txn", &json!({ "compare": [leads], "success": [request] }))?;
        if answer["succeeded"] != json!(true) {
            return Err(StateError("another process may coordinate the job by now".into()));
        }
        self.written = text(&answer["header"]["revision"]);
        Ok(())
    }
}

impl StateStore for EtcdStore {
    fn load(&mut self) -> Result<Option<Vec<u8>>, StateError> {
        let answer = self.ask("kv/range", &json!({ "key": self.key("state") }))?;
        let found = &answer["kvs"][0];
        let Some(value) = found["value"].as_str() else { return Ok(None) };
        self.written = text(&found["mod_revision"]);
        base64::decode(value).map(Some).ok_or_else(|| StateError("etcd's answer is no base64".into()))
    }

    fn store(&mut self, state: &[u8]) -> Result<(), StateError> {
        let put = json!({ "key": self.key("state"), "value": base64::encode(state) });
        self.change(json!({ "request_put": put }))
    }

    fn remove(&mut self) -> Result<(), StateError> {
        self.change(json!({ "request_delete_range": { "key": self.key("state") } }))?;
        self.resign()
    }

    fn check(&mut self) -> Result<(), StateError> {
        // What cannot be asked may still hold: nobody else can ask either.
        let Ok(is_kept) = self.keep_alive() else { return Ok(()) };
        let written = self.written.clone();
        let other = if is_kept { Ok(None) } else { self.try_to_lead(Some(&written)) };
        match other {
            Ok(Some(other)) => Err(StateError(format!(
                "{} coordinates the job now: this process was not heard of for {LEASE_SECONDS} s",
                other.address
            ))),
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

/// Numbers of 64 bits are texts in JSON.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
