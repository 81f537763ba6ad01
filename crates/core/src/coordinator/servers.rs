//! The job's servers and their data cores.

use super::progress::Reporting;
use super::replication::Primary;
use crate::address::Addresses;
use crate::limits;
use crate::standstill::Standstill;
use crate::status::ShardReport;
use crate::types::{NodeId, ProcessId, ServerId, ShardId, Time};
use crate::wire::{Plan, Refusal, ServedShard, Welcome};
use std::collections::BTreeMap;
use std::time::Duration;

/// The server processes, and every data core of them.
#[derive(Debug)]
pub(super) struct Servers {
    /// How many the job waits for.
    expected: u32,
    /// The server in the coordinator's process, if there is one.
    own: Option<ServerId>,
    processes: BTreeMap<ServerId, Process>,
    shards: BTreeMap<ShardId, Shard>,
}

/// A server process.
#[derive(Debug)]
struct Process {
    id: ProcessId,
    cores: u32,
}

/// A shard as the coordinator knows it.
#[derive(Debug, Default)]
struct Shard {
    addresses: Option<Addresses>,
    /// Since when it is not connected, if it is not; later by the time that the coordinator has stood still since.
    lost_since: Option<Time>,
    /// When it was heard last; later by the time that the coordinator has stood still since.
    last_heard: Time,
    /// It was said to be silent, and has not been heard since.
    is_silent: bool,
    /// The plan was sent on this connection.
    informed: bool,
    /// Its last report, and when it came.
    report: Option<(Time, ShardReport)>,
    /// When bytes or versions last moved there; later by the time that the coordinator has stood still since.
    moved: Time,
    /// It makes no progress since then, and another may take its place.
    left_behind: Option<Time>,
}

impl Shard {
    /// Its last report. The reasons in an old one are marked as such: the shard may think otherwise by now.
    fn last_report(&self, now: Time) -> Option<ShardReport> {
        let (came, mut report) = self.report.clone()?;
        let age = now.since(came);
        if age >= limits::OLD_REPORT {
            let waits = report.tables.iter_mut().flat_map(|table| &mut table.waiting);
            let note = format!(" (so it said {} s ago; it has not reported since)", age.as_secs());
            waits.for_each(|waiting| waiting.reason += &note);
        }
        Some(report)
    }
}

/// What a data core is for.
#[derive(Debug, PartialEq)]
pub(super) enum Place {
    /// It serves a shard.
    Serves(Welcome),
    /// The job's shards are served by others.
    Spare,
}

/// A data core that says hello.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    pub(super) process: ProcessId,
    pub(super) server: Option<ServerId>,
    pub(super) core: u32,
    pub(super) cores: u32,
}

impl Servers {
    /// `own` is the server in the coordinator's process.
    pub(super) fn new(expected: u32, own: Option<ServerId>) -> Servers {
        Servers { expected, own, processes: BTreeMap::new(), shards: BTreeMap::new() }
    }

    /// The servers of a plan, which are away and come back.
    pub(super) fn restore(&mut self, now: Time, served: &[ServedShard]) {
        for ServedShard { shard, process, addresses, .. } in served {
            let entry = self.processes.entry(shard.server).or_insert(Process { id: *process, cores: 0 });
            entry.cores += 1;
            // They come back when they notice: a copy does not take over before.
            let since = now + limits::SHARDS_RETURN;
            let (addresses, lost_since) = (Some(addresses.clone()), Some(since));
            self.shards
                .insert(*shard, Shard { addresses, lost_since, last_heard: since, ..Shard::default() });
        }
    }

    /// A data core says hello. Once there is a plan it says who serves a shard.
    pub(super) fn accept(
        &mut self,
        now: Time,
        caller: Caller,
        plan: Option<&Plan>,
    ) -> Result<Place, Refusal> {
        let Caller { process, server: wanted, core, cores } = caller;
        let refuse = |reason| Err(Refusal { reason, retry: false });
        let expected = self.expected;
        let known = self.processes.iter().find(|(_, known)| known.id == process).map(|(id, _)| *id);
        let is_free = |id: &ServerId| !self.processes.contains_key(id) && self.own != Some(*id);
        let free = || (0..expected).map(ServerId).find(is_free);
        let place = wanted.or(known).or_else(free).map(|server| ShardId { server, core });
        if let Some(plan) = plan {
            let served = wanted.and(place).and_then(|id| plan.served(id));
            return match served {
                Some(served) if served.process == process => self.welcome(now, served.shard, process),
                // A shard that was taken over by another process is only on its way.
                Some(served)
                    if served.copy.is_none()
                        && served.since == Plan::FIRST_EPOCH
                        && !self.is_connected(served.shard) =>
                {
                    refuse(format!(
                        "{} ended with its parameters while the job ran; start the job anew, or keep copies with `--replicas 1`",
                        served.shard.server
                    ))
                }
                _ => Ok(Place::Spare),
            };
        }
        let Some(id) = place else { return Ok(Place::Spare) };
        let server = id.server;
        if server.0 >= expected || core >= cores || cores > limits::MAX_CORES {
            return refuse(format!(
                "{id} of {cores} is out of range: the job has {expected} servers of at most {} cores",
                limits::MAX_CORES
            ));
        }
        match self.processes.get(&server) {
            Some(found) if found.id == process && found.cores != cores => {
                return refuse(format!("{server} has {} cores, not {cores}", found.cores));
            }
            Some(found) if found.id != process => {
                // The other one may be about to be given up.
                let reason =
                    format!("{server} is another process already; give each its own number, or none");
                return Err(Refusal { reason, retry: true });
            }
            _ => {}
        }
        self.processes.entry(server).or_insert(Process { id: process, cores });
        self.welcome(now, id, process)
    }

    fn welcome(&mut self, now: Time, id: ShardId, process: ProcessId) -> Result<Place, Refusal> {
        if self.shards.get(&id).is_some_and(|shard| shard.lost_since.is_none()) {
            return Err(Refusal { reason: format!("{id} is here already"), retry: true });
        }
        let shard = self.shards.entry(id).or_default();
        (shard.lost_since, shard.left_behind) = (None, None);
        (shard.last_heard, shard.moved) = (now, now);
        shard.informed = false;
        Ok(Place::Serves(Welcome { you: NodeId::Shard(id), incarnation: process.0, session: 0 }))
    }

    /// Shards whose process is not connected now.
    pub(super) fn away(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.shards.iter().filter(|(_, shard)| shard.lost_since.is_some()).map(|(id, _)| *id)
    }

    /// How the process that serves a shard stands.
    pub(super) fn primary(&self, id: ShardId) -> Primary {
        let shard = self.shards.get(&id);
        Primary {
            lost_since: shard.map_or(Some(Time::ZERO), |shard| shard.lost_since.or(shard.left_behind)),
            last_heard: shard.map_or(Time::ZERO, |shard| shard.last_heard),
        }
    }

    /// Before the plan a server that goes away leaves its place to another; after it, its parameters may be gone.
    pub(super) fn lose(&mut self, now: Time, id: ShardId, is_planned: bool) {
        if is_planned {
            if let Some(shard) = self.shards.get_mut(&id) {
                shard.lost_since = Some(now);
                shard.informed = false;
            }
            return;
        }
        self.shards.remove(&id);
        if !self.shards.keys().any(|other| other.server == id.server) {
            self.processes.remove(&id.server);
        }
    }

    /// The job is planned: who is not heard from now on is silent.
    pub(super) fn begin(&mut self, now: Time) {
        self.shards.values_mut().for_each(|shard| shard.last_heard = now);
    }

    /// A shard says something. Whether it was said to be silent before.
    pub(super) fn heard(&mut self, now: Time, id: ShardId) -> bool {
        let Some(shard) = self.shards.get_mut(&id) else { return false };
        shard.last_heard = now;
        std::mem::take(&mut shard.is_silent)
    }

    /// The next shard that is connected and was not heard for so long, once. Nothing can be done about it: the parameters are
    /// there, and who needs them waits.
    pub(super) fn poll_silent(
        &mut self,
        now: Time,
        grace: Duration,
        standstill: &Standstill,
    ) -> Option<ShardId> {
        let is_silent = |shard: &Shard| {
            let is_here = shard.lost_since.is_none() && !shard.is_silent;
            is_here && standstill.deadline(shard.last_heard, grace) <= now
        };
        let (id, shard) = self.shards.iter_mut().find(|(_, shard)| is_silent(shard))?;
        shard.is_silent = true;
        Some(*id)
    }

    /// Sets the addresses at which workers reach a shard.
    pub(super) fn register(&mut self, id: ShardId, addresses: Addresses) {
        if let Some(shard) = self.shards.get_mut(&id) {
            shard.addresses = Some(addresses);
        }
    }

    /// Servers all of whose cores are connected and told where they are reached.
    pub(super) fn complete_count(&self) -> usize {
        let is_here = |shard: &Shard| shard.addresses.is_some() && shard.lost_since.is_none();
        let here = |server: ServerId| {
            self.shards.iter().filter(|(id, shard)| id.server == server && is_here(shard)).count()
        };
        self.processes.iter().filter(|(id, process)| here(**id) == process.cores as usize).count()
    }

    pub(super) fn are_complete(&self) -> bool {
        self.complete_count() >= self.expected as usize
    }

    /// Every shard, with the process that serves it. The servers must be complete.
    pub(super) fn served(&self) -> Vec<ServedShard> {
        let served = |(id, shard): (&ShardId, &Shard)| {
            ServedShard::original(
                *id,
                self.processes[&id.server].id,
                shard.addresses.clone().expect("a complete server is registered"),
            )
        };
        self.shards.iter().map(served).collect()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.shards.keys().copied()
    }

    pub(super) fn is_connected(&self, id: ShardId) -> bool {
        self.shards.get(&id).is_some_and(|shard| shard.lost_since.is_none())
    }

    /// The plan is sent to a shard. Whether it was not sent on this connection before.
    pub(super) fn inform(&mut self, id: ShardId) -> bool {
        self.shards.get_mut(&id).is_some_and(|shard| !std::mem::replace(&mut shard.informed, true))
    }

    /// A shard has missed something of the plan.
    pub(super) fn forget_informed(&mut self, id: ShardId) {
        if let Some(shard) = self.shards.get_mut(&id) {
            shard.informed = false;
        }
    }

    /// Shards that have the plan, and need to hear of changes to it.
    pub(super) fn informed(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.shards.iter().filter(|(_, shard)| shard.informed).map(|(id, _)| *id)
    }

    pub(super) fn take_report(&mut self, now: Time, id: ShardId, report: ShardReport) {
        if let Some(shard) = self.shards.get_mut(&id) {
            if shard.report.as_ref().is_none_or(|(_, before)| moved(before) != moved(&report)) {
                (shard.moved, shard.left_behind) = (now, None);
            }
            shard.report = Some((now, report));
        }
    }

    /// Shards that are here and whose reports are new.
    pub(super) fn reporting(&self, now: Time) -> impl Iterator<Item = Reporting<'_>> {
        let here = self.shards.iter().filter(|(_, shard)| shard.lost_since.is_none());
        here.filter_map(move |(id, shard)| {
            let (came, report) = shard.report.as_ref()?;
            let is_new = now.since(*came) < limits::OLD_REPORT;
            is_new.then_some(Reporting { shard: *id, moved: shard.moved, report })
        })
    }

    /// A shard makes no progress: its copy may take its place. Whether that is news.
    pub(super) fn leave_behind(&mut self, now: Time, id: ShardId) -> bool {
        let shard = self.shards.get_mut(&id).filter(|shard| shard.left_behind.is_none());
        shard.map(|shard| shard.left_behind = Some(now)).is_some()
    }

    pub(super) fn reports(&self, now: Time) -> Vec<ShardReport> {
        self.shards.values().filter_map(|shard| shard.last_report(now)).collect()
    }

    /// Since when each is away, and when each was heard last.
    pub(super) fn silences_mut(&mut self) -> impl Iterator<Item = &mut Time> {
        self.shards.values_mut().flat_map(|shard| {
            shard.lost_since.as_mut().into_iter().chain([&mut shard.last_heard, &mut shard.moved])
        })
    }

    /// When a shard that is away is given up, and the job with it.
    pub(super) fn next_deadline(&self, standstill: &Standstill) -> Option<Time> {
        self.shards.values().filter_map(|shard| shard.deadline(standstill)).min()
    }

    /// A shard that was away for too long, and what to say of it.
    pub(super) fn overdue(&self, now: Time, standstill: &Standstill) -> Option<String> {
        let is_over = |shard: &Shard| shard.deadline(standstill).is_some_and(|deadline| deadline <= now);
        let (id, shard) = self.shards.iter().find(|(_, shard)| is_over(shard))?;
        let address = shard.addresses.as_ref().map_or("an unknown address".into(), Addresses::to_string);
        let seconds = limits::CONNECT_DEADLINE.as_secs();
        Some(format!(
            "{id} at {address} is away for {seconds} s, and its parameters with it; start the job anew"
        ))
    }
}

/// What of a shard moves while it makes progress.
fn moved(report: &ShardReport) -> (u64, u64, u64) {
    let versions = report.tables.iter().fold(0u64, |sum, table| sum.wrapping_add(table.version));
    (report.bytes_pushed, report.bytes_pulled, versions)
}

impl Shard {
    fn deadline(&self, standstill: &Standstill) -> Option<Time> {
        Some(standstill.deadline(self.lost_since?, limits::CONNECT_DEADLINE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Part;
    use crate::policy::Policy;
    use crate::status::{TableReport, WaitReport};
    use crate::table::TableSpec;
    use crate::types::{CopyId, WorkerId};
    use crate::wire::Member;

    const START: Time = Time(0);

    fn caller(process: u64, core: u32) -> Caller {
        Caller { process: ProcessId(process), server: None, core, cores: 2 }
    }

    fn shard(server: u32, core: u32) -> ShardId {
        ShardId { server: ServerId(server), core }
    }

    /// The number that a core is given.
    fn accepted(servers: &mut Servers, caller: Caller, plan: Option<&Plan>) -> NodeId {
        match servers.accept(Time::ZERO, caller, plan) {
            Ok(Place::Serves(welcome)) => welcome.you,
            other => panic!("it serves a shard, and was told {other:?}"),
        }
    }

    /// The plan of servers that are complete.
    fn plan(servers: &Servers) -> Plan {
        Plan {
            epoch: Plan::FIRST_EPOCH,
            tables: vec![TableSpec::dense("w", [1])],
            parts: vec![vec![Part { server: ServerId(0), start: 0, len: 1 }]],
            whole: vec![],
            shards: servers.served(),
            workers: 1,
            members: vec![Member::original(WorkerId(0), 1)],
            policy: Policy::default(),
            overrides: vec![],
            switches: vec![],
            seed: 0,
            resumed: None,
        }
    }

    /// Two servers of two cores, told where they are reached.
    fn complete() -> Servers {
        let mut servers = Servers::new(2, None);
        for (process, core) in [(7, 0), (8, 0), (8, 1), (7, 1)] {
            let you = accepted(&mut servers, caller(process, core), None);
            assert_eq!(
                you,
                NodeId::Shard(shard(process as u32 - 7, core)),
                "by the order of their first cores"
            );
        }
        for id in servers.ids().collect::<Vec<_>>() {
            assert!(!servers.are_complete());
            servers.register(id, format!("host:{}", id.core).into());
        }
        servers
    }

    fn refusal(servers: &mut Servers, caller: Caller, plan: Option<&Plan>) -> Refusal {
        servers.accept(Time::ZERO, caller, plan).expect_err("it is refused")
    }

    #[test]
    fn a_server_is_here_when_all_its_cores_are() {
        let mut servers = complete();
        assert_eq!((servers.complete_count(), servers.are_complete()), (2, true));
        let served: Vec<_> = servers.served().iter().map(|served| (served.shard, served.process)).collect();
        assert_eq!((served.len(), served[3]), (4, (shard(1, 1), ProcessId(8))));
        servers.lose(START, shard(1, 0), true);
        assert_eq!((servers.complete_count(), servers.are_complete()), (1, false));
        assert!(!servers.is_connected(shard(1, 0)) && servers.is_connected(shard(1, 1)));
    }

    #[test]
    fn nobody_takes_the_number_of_the_coordinators_own_server_by_chance() {
        let mut servers = Servers::new(2, Some(ServerId(0)));
        assert_eq!(accepted(&mut servers, caller(9, 0), None), NodeId::Shard(shard(1, 0)));
        assert_eq!(servers.accept(Time::ZERO, caller(10, 0), None), Ok(Place::Spare));
        let own = Caller { server: Some(ServerId(0)), ..caller(7, 0) };
        assert_eq!(accepted(&mut servers, own, None), NodeId::Shard(shard(0, 0)));
    }

    #[test]
    fn who_does_not_fit_the_job_is_told_why() {
        let mut servers = complete();
        assert_eq!(servers.accept(Time::ZERO, caller(9, 0), None), Ok(Place::Spare), "all servers are here");
        let cores = refusal(&mut servers, Caller { cores: 3, ..caller(7, 2) }, None);
        assert!(!cores.retry && cores.reason.contains("server 0 has 2 cores, not 3"), "{cores:?}");
        let again = refusal(&mut servers, caller(7, 1), None);
        assert!(again.retry && again.reason.contains("is here already"), "{again:?}");
        let mut servers = Servers::new(2, None);
        let most = limits::MAX_CORES;
        for (server, core, cores) in [(2, 0, 1), (0, 2, 2), (0, 0, most + 1)] {
            let caller = Caller { process: ProcessId(7), server: Some(ServerId(server)), core, cores };
            let range = refusal(&mut servers, caller, None);
            assert!(!range.retry && range.reason.contains("is out of range"), "{range:?}");
        }
        let largest =
            Caller { process: ProcessId(7), server: Some(ServerId(1)), core: most - 1, cores: most };
        assert!(servers.accept(Time::ZERO, largest, None).is_ok());
    }

    #[test]
    fn another_process_takes_the_place_of_a_server_only_before_there_are_parameters() {
        let mut servers = complete();
        let other = Caller { server: Some(ServerId(1)), ..caller(9, 0) };
        assert!(refusal(&mut servers, other, None).retry, "the other one may be about to be given up");
        servers.lose(START, shard(1, 0), false);
        assert!(refusal(&mut servers, other, None).retry, "its other core is still here");
        servers.lose(START, shard(1, 1), false);
        assert!(servers.accept(Time::ZERO, other, None).is_ok());

        let mut servers = complete();
        let mut plan = plan(&servers);
        assert_eq!(servers.accept(Time::ZERO, other, Some(&plan)), Ok(Place::Spare));
        servers.lose(START, shard(1, 0), true);
        servers.lose(START, shard(1, 1), true);
        let late = refusal(&mut servers, other, Some(&plan));
        assert!(!late.retry && late.reason.contains("ended with its parameters"), "{late:?}");
        let own = Caller { server: Some(ServerId(1)), ..caller(8, 0) };
        assert_eq!(accepted(&mut servers, own, Some(&plan)), NodeId::Shard(shard(1, 0)), "it comes back");
        // The other core's shard has a copy, which is about to take over.
        plan.shards[3].copy = Some(CopyId { process: ProcessId(7), order: 1 });
        let other = Caller { core: 1, ..other };
        assert_eq!(servers.accept(Time::ZERO, other, Some(&plan)), Ok(Place::Spare));
        plan.shards[3].process = ProcessId(7);
        let own = Caller { core: 1, ..own };
        assert_eq!(servers.accept(Time::ZERO, own, Some(&plan)), Ok(Place::Spare), "it is served elsewhere");
    }

    #[test]
    fn a_shard_is_told_the_plan_once_on_each_connection() {
        let mut servers = complete();
        let id = shard(0, 1);
        assert!(servers.inform(id) && !servers.inform(id) && !servers.inform(shard(5, 0)));
        assert_eq!(servers.informed().collect::<Vec<_>>(), [id]);
        servers.lose(START, id, true);
        assert_eq!(servers.informed().count(), 0);
        let plan = plan(&servers);
        let own = Caller { server: Some(ServerId(0)), ..caller(7, 1) };
        accepted(&mut servers, own, Some(&plan));
        assert!(servers.inform(id));
        servers.forget_informed(id);
        assert_eq!(servers.informed().count(), 0);
    }

    #[test]
    fn a_shard_that_is_away_for_too_long_ends_the_job_by_name() {
        let (mut servers, standstill) = (complete(), Standstill::default());
        let plan = plan(&servers);
        assert_eq!((servers.next_deadline(&standstill), servers.overdue(START, &standstill)), (None, None));
        let lost = Time::from_secs_f64(5.0);
        servers.lose(lost, shard(1, 1), true);
        let over = lost + limits::CONNECT_DEADLINE;
        assert_eq!(servers.next_deadline(&standstill), Some(over));
        assert_eq!(servers.overdue(Time(over.0 - 1), &standstill), None);
        let sentence = servers.overdue(over, &standstill).unwrap();
        assert!(sentence.contains(&format!("{} at host:1 is away for 30 s", shard(1, 1))), "{sentence}");
        let own = Caller { server: Some(ServerId(1)), ..caller(8, 1) };
        accepted(&mut servers, own, Some(&plan));
        assert_eq!(servers.overdue(over, &standstill), None, "it came back");
    }

    #[test]
    fn reasons_in_an_old_report_say_how_old_they_are() {
        let mut servers = complete();
        let reason = "worker 1 is behind".into();
        let table = TableReport {
            name: "w".into(),
            elements: 1,
            sync: "bsp".into(),
            version: 0,
            workers: 2,
            stats: Default::default(),
            waiting: vec![WaitReport { worker: WorkerId(0), seconds: 1.0, reason }],
            missing: vec![],
        };
        let report = ShardReport {
            shard: shard(0, 0),
            tables: vec![table],
            bytes_pushed: 0,
            bytes_pulled: 0,
            nonfinite: 0,
            refused: 0,
            memory_bytes: 0,
            links: None,
        };
        servers.take_report(START, shard(0, 0), report);
        let reason = |now| servers.reports(now)[0].tables[0].waiting[0].reason.clone();
        let old = START + limits::OLD_REPORT;
        assert_eq!(reason(Time(old.0 - 1)), "worker 1 is behind");
        assert!(reason(old).contains("worker 1 is behind (so it said 3 s ago"), "{}", reason(old));
        assert_eq!(servers.reports(old).len(), 1, "the others have not reported");
    }
}
