//! The world with toy roles: a caller that sends numbered frames and wants each back, a callee that echoes.

use super::*;
use crate::network::NetworkConfig;
use crate::rule::Rule;
use crate::rules::{Closed, Cut, Injected, Partition};
use paramill_core::fault::{Delay, Fate, FaultPlan};
use paramill_core::role::{Body, Frame};
use paramill_core::types::{ConnectionId, WorkerId};
use paramill_core::wire::Welcome;
use paramill_core::wire::{Hello, Kind, Party, Refusal};

const CALLEE: NodeId = NodeId::Coordinator;

fn caller(rank: u32) -> NodeId {
    NodeId::Worker(WorkerId(rank))
}

#[derive(Debug, Default)]
struct Toy {
    me: Option<u32>,
    /// Frames to send, and those that came back with their times.
    wanted: u64,
    heard: Vec<(u64, Time)>,
    connected: bool,
    greeted: u32,
    losses: Vec<String>,
    retry_at: Option<Time>,
    outputs: VecDeque<Output>,
}

impl Toy {
    fn caller(rank: u32, wanted: u64) -> Toy {
        Toy { me: Some(rank), wanted, retry_at: Some(Time::ZERO), ..Toy::default() }
    }

    fn send(&mut self, to: ConnectionId, request: u64) {
        let header = Header { request, payload_bytes: 8, ..Header::new(Kind::Pull) };
        let body = Body::Bytes(request.to_le_bytes().to_vec());
        self.outputs.push_back(Output::send(to, Frame { header, body }));
    }
}

impl Role for Toy {
    fn node(&self) -> Option<NodeId> {
        None
    }

    fn accept(&mut self, _now: Time, hello: &Hello) -> Result<Welcome, Refusal> {
        self.greeted += 1;
        match hello.from {
            Party::Worker { rank: Some(rank) } if hello.job == "toy" => {
                Ok(Welcome { you: NodeId::Worker(rank), incarnation: 1, session: 0 })
            }
            _ => Err(Refusal { reason: "not a toy".into(), retry: false }),
        }
    }

    fn hello(&self, _connection: ConnectionId) -> Hello {
        Hello {
            job: "toy".into(),
            from: Party::Worker { rank: self.me.map(WorkerId) },
            incarnation: 1,
            to: None,
        }
    }

    fn handle_connected(&mut self, _now: Time, connection: ConnectionId, _welcome: &Welcome) {
        self.connected = true;
        for request in self.heard.len() as u64..self.wanted {
            self.send(connection, request);
        }
    }

    fn handle_disconnected(&mut self, now: Time, _connection: ConnectionId, why: &Lost) {
        self.losses.push(why.to_string());
        self.connected = false;
        if self.me.is_some() {
            self.retry_at = Some(now + Duration::from_millis(5));
        }
    }

    fn handle_frame(&mut self, now: Time, connection: ConnectionId, header: &Header, payload: &[u8]) {
        assert_eq!(payload, header.request.to_le_bytes());
        self.heard.push((header.request, now));
        if self.me.is_none() {
            self.send(connection, header.request);
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.retry_at.take_if(|at| *at <= now).is_some() {
            self.outputs.push_back(Output::Connect { connection: CALLEE.into(), address: "callee".into() });
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        self.retry_at
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn payload<'a>(&'a self, body: &'a Body) -> &'a [u8] {
        match body {
            Body::Bytes(bytes) => bytes,
            _ => &[],
        }
    }
}

/// Latency 100 us, no jitter, no rate.
fn config() -> NetworkConfig {
    NetworkConfig {
        latency_us: 100.0,
        jitter_us: 0.0,
        gbit_per_s: 0.0,
        handling_us: 0.0,
        ..Default::default()
    }
}

fn world(callers: u32, wanted: u64, handling: Duration) -> World<Toy> {
    let mut world = World::new(Network::star(config()), 1);
    world.add(CALLEE, "callee", HostId(0), handling, Toy::default());
    for rank in 0..callers {
        let address = format!("caller {rank}");
        world.add(caller(rank), &address, HostId(1 + rank), Duration::ZERO, Toy::caller(rank, wanted));
    }
    world
}

fn second(seconds: f64) -> Time {
    Time::from_secs_f64(seconds)
}

fn run(world: &mut World<Toy>, until: f64) {
    world.run(second(until), &mut Unobserved, |_| false).unwrap();
}

fn requests(world: &World<Toy>, rank: u32) -> Vec<u64> {
    world.role(caller(rank)).unwrap().heard.iter().map(|&(request, _)| request).collect()
}

#[test]
fn frames_come_back_in_order_after_two_round_trips() {
    let mut world = world(2, 3, Duration::ZERO);
    run(&mut world, 1.0);
    for rank in 0..2 {
        assert_eq!(requests(&world, rank), [0, 1, 2]);
        let (_, last) = world.role(caller(rank)).unwrap().heard[2];
        assert_eq!(last, Time(400_000));
    }
    assert_eq!(world.counts().frames, 12);
    assert_eq!(world.now(), second(1.0));
}

#[test]
fn a_node_handles_one_frame_at_a_time() {
    let mut world = world(2, 2, Duration::from_millis(10));
    run(&mut world, 1.0);
    let last = (0..2).map(|rank| world.role(caller(rank)).unwrap().heard[1].1).max().unwrap();
    assert_eq!(last, Time(40_000_000 + 400_000));
}

#[test]
fn what_happens_to_a_paused_node_waits() {
    let mut world = world(1, 1, Duration::ZERO);
    world.pause(CALLEE, Time::ZERO, Duration::from_secs(2));
    world.pause(CALLEE, second(1.0), Duration::from_secs(2));
    run(&mut world, 10.0);
    assert_eq!(world.role(caller(0)).unwrap().heard, [(0, Time(3_000_000_000 + 300_000))]);
}

#[test]
fn a_crash_is_noticed_and_calling_the_dead_fails() {
    let mut world = world(1, 1, Duration::ZERO);
    world.crash(CALLEE, second(0.01));
    run(&mut world, 0.02);
    assert_eq!(world.ended(CALLEE), Some(&Ended::Crashed));
    let losses = &world.role(caller(0)).unwrap().losses;
    assert_eq!(losses[0], "the peer died");
    assert!(losses[1].contains("nobody is there"), "{losses:?}");
}

/// Breaks the connection when request 1 is echoed for the first time.
#[derive(Debug, Default)]
struct BreakOnce {
    done: bool,
}

impl Rule for BreakOnce {
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        if frame.from == CALLEE && frame.header.request == 1 && !std::mem::replace(&mut self.done, true) {
            return Fate::Reset;
        }
        Fate::Pass
    }
}

#[test]
fn a_reset_loses_what_is_under_way_and_tells_both_ends() {
    let mut world = world(1, 4, Duration::ZERO);
    world.rules().add(BreakOnce::default());
    run(&mut world, 1.0);
    // The echo of request 0 was under way when the connection broke.
    assert_eq!(requests(&world, 0), [0, 1, 2, 3]);
    assert_eq!(world.role(caller(0)).unwrap().losses, ["the connection was reset"]);
    assert_eq!(world.role(CALLEE).unwrap().losses, ["the connection was reset"]);
    let heard: Vec<u64> = world.role(CALLEE).unwrap().heard.iter().map(|&(request, _)| request).collect();
    assert_eq!(heard, [0, 1, 0, 1, 2, 3]);
}

#[test]
fn a_partition_holds_frames_and_refuses_connections_until_it_is_over() {
    let mut world = world(2, 1, Duration::ZERO);
    world.rules().add(Partition::new(vec![caller(1)], Time::ZERO, second(0.5)));
    run(&mut world, 1.0);
    assert_eq!(world.role(caller(0)).unwrap().heard[0].1, Time(400_000));
    let cut = world.role(caller(1)).unwrap();
    assert!(cut.losses.len() > 50 && cut.losses[0].contains("partitioned"), "{:?}", cut.losses.first());
    assert!(cut.heard[0].1 > second(0.5));
}

#[test]
fn a_node_that_refuses_is_tried_again() {
    let mut world = world(1, 1, Duration::ZERO);
    world.rules().add(Closed::new(CALLEE, Time::ZERO, second(0.05)));
    run(&mut world, 1.0);
    let role = world.role(caller(0)).unwrap();
    assert!(role.losses.len() > 5 && role.losses[0] == "the coordinator refused the connection");
    assert_eq!(role.heard.len(), 1);
}

#[test]
fn who_comes_back_early_ends_the_old_connection_first() {
    let mut world = world(1, 1, Duration::ZERO);
    run(&mut world, 0.01);
    // The caller dials again though its connection stands; the callee hears the end of that one and then the hello.
    let now = world.now();
    world.role_mut(caller(0)).unwrap().retry_at = Some(now);
    run(&mut world, 0.01015);
    let callee = world.role(CALLEE).unwrap();
    assert_eq!(callee.losses, ["replaced by a new connection"]);
    assert_eq!(callee.greeted, 2);
}

#[test]
fn an_injected_delay_holds_back_what_follows_on_the_connection() {
    let mut world = world(1, 3, Duration::ZERO);
    let plan = FaultPlan::parse(&["worker=0:delay=1s"]).unwrap();
    world.rules().add(Injected::new(&plan, 1));
    run(&mut world, 10.0);
    let times: Vec<Time> = world.role(caller(0)).unwrap().heard.iter().map(|&(_, at)| at).collect();
    assert_eq!(times, [Time(2_000_400_000); 3]);
}

/// Makes the echo of request 1 late.
#[derive(Debug)]
struct LateEcho;

impl Rule for LateEcho {
    fn on_frame(&mut self, frame: &FrameView<'_>) -> Fate {
        let is_meant = frame.from == CALLEE && frame.header.request == 1;
        if is_meant { Fate::Delay(Delay::of_answer(Duration::from_secs(1))) } else { Fate::Pass }
    }
}

#[test]
fn a_late_answer_is_overtaken() {
    let mut world = world(1, 3, Duration::ZERO);
    world.rules().add(LateEcho);
    run(&mut world, 10.0);
    let heard = &world.role(caller(0)).unwrap().heard;
    assert_eq!(*heard, [(0, Time(400_000)), (2, Time(400_000)), (1, Time(1_000_400_000))]);
}

#[test]
fn a_seed_gives_the_same_run() {
    let digest = |seed| {
        let mut world: World<Toy> = World::new(Network::star(NetworkConfig::default()), seed);
        world.add(CALLEE, "callee", HostId(0), Duration::from_micros(1), Toy::default());
        for rank in 0..3 {
            world.add(caller(rank), "", HostId(1 + rank), Duration::ZERO, Toy::caller(rank, 20));
        }
        let plan = FaultPlan::parse(&["link:reset,p=0.05"]).unwrap();
        world.rules().add(Injected::new(&plan, seed));
        run(&mut world, 5.0);
        (world.counts().events, world.role(CALLEE).unwrap().heard.clone())
    };
    assert_eq!(digest(1), digest(1));
    assert_ne!(digest(1), digest(2));
}

/// Objects to the third frame that is delivered.
#[derive(Default)]
struct Objector(u32);

impl Observer<Toy> for Objector {
    fn on_delivered(&mut self, frame: &FrameView<'_>, _role: &Toy) -> Result<(), String> {
        self.0 += 1;
        if self.0 == 3 { Err(format!("{} heard a third frame", frame.to)) } else { Ok(()) }
    }
}

#[test]
fn an_observers_objection_ends_the_run_with_its_time() {
    let violation =
        world(1, 5, Duration::ZERO).run(second(1.0), &mut Objector::default(), |_| false).unwrap_err();
    assert_eq!(violation.to_string(), "the coordinator heard a third frame (at 0.000300 s of virtual time)");
}

#[test]
fn what_is_held_is_read_when_it_is_let_through_or_released() {
    let mut world = world(2, 5, Duration::ZERO);
    world.hold(caller(0), CALLEE);
    run(&mut world, 1.0);
    let heard_by_callee = |world: &World<Toy>| world.role(CALLEE).unwrap().heard.len();
    let unread = |world: &World<Toy>| -> Vec<u64> {
        world.unread(caller(0), CALLEE).map(|header| header.request).collect()
    };
    assert_eq!((heard_by_callee(&world), unread(&world)), (5, vec![0, 1, 2, 3, 4]));
    assert_eq!((requests(&world, 0), requests(&world, 1)), (vec![], vec![0, 1, 2, 3, 4]), "others are read");
    world.let_through(caller(0), CALLEE, 2);
    run(&mut world, 2.0);
    assert_eq!((requests(&world, 0), unread(&world)), (vec![0, 1], vec![2, 3, 4]));
    world.release(caller(0), CALLEE);
    run(&mut world, 3.0);
    assert_eq!((requests(&world, 0), unread(&world)), (vec![0, 1, 2, 3, 4], vec![]));
    assert!(world.role(caller(0)).unwrap().losses.is_empty());
}

#[test]
fn what_is_held_is_lost_with_its_connection() {
    let mut world = world(2, 3, Duration::ZERO);
    world.hold(CALLEE, caller(0));
    run(&mut world, 1.0);
    assert_eq!(world.unread(CALLEE, caller(0)).count(), 3);
    world.break_connection(caller(0), CALLEE, "a test broke it");
    assert_eq!(world.unread(CALLEE, caller(0)).count(), 0);
    // The next connection is held as the first one was.
    run(&mut world, 2.0);
    assert_eq!(world.unread(CALLEE, caller(0)).count(), 3);
    assert_eq!(world.role(caller(0)).unwrap().losses, ["a test broke it"]);
    assert!(world.role(caller(1)).unwrap().losses.is_empty(), "the connection of others stands");
}

#[test]
fn an_injected_frame_arrives_as_if_the_role_had_said_it() {
    let mut world = world(1, 2, Duration::ZERO);
    let frame = || {
        let header = Header { request: 9, payload_bytes: 8, ..Header::new(Kind::Pull) };
        Frame { header, body: Body::Bytes(9u64.to_le_bytes().to_vec()) }
    };
    assert!(!world.inject(caller(0), CALLEE, frame()), "they are not connected");
    run(&mut world, 1.0);
    assert!(world.inject(caller(0), CALLEE, frame()));
    run(&mut world, 2.0);
    assert_eq!(requests(&world, 0), [0, 1, 9]);
}

#[test]
fn who_is_cut_off_from_another_still_reaches_the_others() {
    let mut world = world(2, 1, Duration::ZERO);
    world.rules().add(Cut::new(CALLEE, caller(0)));
    run(&mut world, 1.0);
    assert_eq!((requests(&world, 0), requests(&world, 1)), (vec![], vec![0]));
    assert_eq!(world.role(caller(0)).unwrap().losses[0], "there is no way to the coordinator");
    world.rules().clear();
    run(&mut world, 2.0);
    assert_eq!(requests(&world, 0), [0]);
}
