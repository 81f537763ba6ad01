//! Transfers over shared links, against shares that were computed by hand.
//!
//! A transfer is a flow of frames of 8 kB with a window, as a connection has one: the next frame is sent when one is
//! through.

use super::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const FRAME: f64 = 8000.0;

#[derive(Debug, Clone, Copy)]
struct Transfer {
    from: u32,
    to: u32,
    frames: u64,
}

fn transfer(from: u32, to: u32, frames: u64) -> Transfer {
    Transfer { from, to, frames }
}

/// Hosts with 1 Gbit/s: a frame takes 64 us.
fn config() -> NetworkConfig {
    NetworkConfig { latency_us: 10.0, jitter_us: 0.0, gbit_per_s: 1.0, ..Default::default() }
}

fn tiers(text: &str, hosts: u32) -> Network {
    let Ok(Topology::ThreeTier(tiers)) = text.parse() else { panic!("{text}") };
    let racks = Racks::new(&tiers, hosts);
    Network::three_tier(config(), tiers, racks)
}

/// One rack: a switch that shares links fairly.
fn rack() -> Network {
    tiers("three-tier:hosts_per_edge=100", 100)
}

/// When every transfer is over, in seconds, and how many frames of each were through by `look_at`.
fn run(network: &mut Network, transfers: &[Transfer], look_at: f64) -> (Vec<f64>, Vec<u64>) {
    const WINDOW: u64 = 32;
    let mut dice = Prng::new(1);
    let (mut sent, mut done) = (vec![0; transfers.len()], vec![0; transfers.len()]);
    let (mut ends, mut seen) = (vec![0.0; transfers.len()], vec![0; transfers.len()]);
    let mut sending: BinaryHeap<Reverse<(Time, usize)>> = BinaryHeap::new();
    for flow in 0..transfers.len() {
        sending.extend((0..WINDOW).map(|_| Reverse((Time::ZERO, flow))));
    }
    loop {
        let next_send = sending.peek().map(|Reverse((at, _))| *at);
        let through = match (next_send, network.next_time()) {
            (Some(at), steps) if steps.is_none_or(|step| at < step) => {
                let Some(Reverse((_, flow))) = sending.pop() else { unreachable!() };
                let Transfer { from, to, frames } = transfers[flow];
                if sent[flow] == frames {
                    continue;
                }
                sent[flow] += 1;
                let parcel = Parcel { from: HostId(from), to: HostId(to), flow, bytes: FRAME };
                network.send_shared(at, parcel, flow as u32, &mut dice)
            }
            (None, _) if network.is_idle() => return (ends, seen),
            _ => network.step(),
        };
        if let Some((flow, passage)) = through {
            let flow = flow as usize;
            done[flow] += 1;
            ends[flow] = passage.tail.as_secs_f64();
            seen[flow] += u64::from(passage.tail.as_secs_f64() <= look_at);
            sending.push(Reverse((passage.tail, flow)));
        }
    }
}

fn close(value: f64, expected: f64, tolerance: f64) {
    assert!((value / expected - 1.0).abs() <= tolerance, "{value}, expected {expected}");
}

#[test]
fn one_frame_takes_what_it_takes_over_a_star() {
    let mut shared = rack();
    let mut star = Network::star(config());
    let parcel = Parcel { from: HostId(0), to: HostId(1), flow: 0, bytes: FRAME };
    let passage = star.send(Time::ZERO, parcel, &mut Prng::new(1));
    let received = star.receive(passage.head, HostId(0), HostId(1), passage.tail, FRAME);
    let (ends, _) = run(&mut shared, &[transfer(0, 1, 1)], 0.0);
    assert_eq!(ends[0], received.as_secs_f64());
    assert_eq!(shared.usage(HostId(0)), star.usage(HostId(0)));
    assert_eq!(shared.usage(HostId(1)), star.usage(HostId(1)));
}

#[test]
fn two_flows_on_one_link_get_half_each() {
    // They leave one host; they come to one host.
    for transfers in
        [[transfer(0, 1, 1000), transfer(0, 2, 1000)], [transfer(1, 0, 1000), transfer(2, 0, 1000)]]
    {
        let (ends, seen) = run(&mut rack(), &transfers, 0.064);
        close(seen[0] as f64, 500.0, 0.01);
        close(seen[1] as f64, 500.0, 0.01);
        ends.iter().for_each(|end| close(*end, 0.128, 0.01));
    }
}

#[test]
fn a_flow_of_small_frames_gets_as_many_bytes_as_one_of_large_frames() {
    let mut network = rack();
    let mut dice = Prng::new(1);
    let mut through = [0u64; 2];
    for (flow, bytes, frames) in [(0, 90_000.0, 100), (1, 1000.0, 9000)] {
        for _ in 0..frames {
            let parcel = Parcel { from: HostId(0), to: HostId(1 + flow as u32), flow, bytes };
            network.send_shared(Time::ZERO, parcel, flow as u32, &mut dice);
        }
    }
    while network.next_time().is_some_and(|at| at < Time::from_secs_f64(0.05)) {
        if let Some((flow, _)) = network.step() {
            through[flow as usize] += [90_000, 1000][flow as usize];
        }
    }
    close(through[0] as f64, through[1] as f64, 0.05);
}

#[test]
fn what_a_flow_cannot_use_is_left_to_others() {
    // Three flows come to host 0; one of them shares its sender's link with three others, and gets a quarter of that. The other two
    // have three eighths each of host 0.
    let transfers = [
        transfer(1, 0, 2000),
        transfer(2, 0, 2000),
        transfer(3, 0, 2000),
        transfer(3, 4, 2000),
        transfer(3, 5, 2000),
        transfer(3, 6, 2000),
    ];
    let at = 0.2;
    let (_, seen) = run(&mut rack(), &transfers, at);
    let frames = at / 64e-6;
    for (seen, share) in seen.iter().zip([0.375, 0.375, 0.25, 0.25, 0.25, 0.25]) {
        close(*seen as f64, frames * share, 0.02);
    }
}

#[test]
fn forty_workers_that_pull_from_ten_servers_wait_for_the_servers_links() {
    // Each worker gets a tenth of 8 MB from each server: a server sends 40 times 0.8 MB over 1 Gbit/s.
    let pull = |server| (0..40).map(move |worker| transfer(server, 10 + worker, 100));
    let transfers: Vec<Transfer> = (0..10).flat_map(pull).collect();
    let mut network = tiers("three-tier", 50);
    let (ends, _) = run(&mut network, &transfers, 0.0);
    close(ends.iter().copied().fold(0.0, f64::max), 40.0 * 0.8e6 * 8.0 / 1e9, 0.03);
    assert_eq!(network.usage(HostId(3)).bytes_out, 40 * 800_000);
    assert_eq!(network.usage(HostId(13)).bytes_in, 8_000_000);
}

#[test]
fn oversubscribed_uplinks_bound_what_crosses_them() {
    // Racks of four hosts, one behind the other. Each host of rack 0 sends to one of rack 1, or of rack 2, which is under another
    // aggregation switch.
    let time = |text: &str, first_receiver: u32| {
        let text = format!("three-tier:hosts_per_edge=4,edges_per_aggregation=2,fill=packed{text}");
        let transfers: Vec<Transfer> =
            (0..4).map(|host| transfer(host, first_receiver + host, 500)).collect();
        run(&mut tiers(&text, 16), &transfers, 0.0).0.into_iter().fold(0.0, f64::max)
    };
    let alone = 500.0 * 64e-6;
    for (text, next_rack, far_rack) in [
        ("", 1.0, 1.0),
        (",edge_oversubscription=2", 2.0, 2.0),
        (",edge_oversubscription=4", 4.0, 4.0),
        // 8 Gbit/s below it, and half of that is 4: enough for four hosts. A sixteenth is half a Gbit/s.
        (",aggregation_oversubscription=2", 1.0, 1.0),
        (",aggregation_oversubscription=16", 1.0, 8.0),
        (",edge_uplink_gbit_per_s=1,aggregation_uplink_gbit_per_s=0.5", 4.0, 8.0),
        (",core_gbit_per_s=2", 1.0, 2.0),
    ] {
        close(time(text, 4), alone * next_rack, 0.02);
        close(time(text, 8), alone * far_rack, 0.02);
    }
}

#[test]
fn background_traffic_takes_its_share() {
    let share = |gbit_per_s: Option<f64>, flows: usize| {
        let mut network = rack();
        let flow = BackgroundFlow {
            from: HostId(0),
            to: HostId(9),
            gbit_per_s,
            starts: Time::ZERO,
            until: Time::from_secs_f64(100.0),
        };
        (0..flows).for_each(|_| network.add_background(&flow));
        let (ends, _) = run(&mut network, &[transfer(0, 1, 5000)], 0.0);
        5000.0 * 64e-6 / ends[0]
    };
    // Greedy ones share alike. One with a rate takes no more than that, nor more than its share.
    for (gbit_per_s, flows, expected) in
        [(None, 1, 0.5), (None, 3, 0.25), (Some(0.3), 1, 0.7), (Some(0.2), 2, 0.6), (Some(0.9), 1, 0.5)]
    {
        close(share(gbit_per_s, flows), expected, 0.02);
    }
}

#[test]
fn background_traffic_begins_and_ends_at_its_times() {
    let mut network = rack();
    let (starts, until) = (Time::from_secs_f64(0.1), Time::from_secs_f64(0.3));
    let flow = BackgroundFlow { from: HostId(0), to: HostId(9), gbit_per_s: None, starts, until };
    network.add_background(&flow);
    let (ends, seen) = run(&mut network, &[transfer(0, 1, 5000)], 0.1);
    close(seen[0] as f64, 0.1 / 64e-6, 0.01);
    // 0.32 s of work; half of 0.2 s is taken by others, and then their eight frames of 64 KiB that are under way.
    close(ends[0], 0.42 + 8.0 * 65536.0 * 8e-9, 0.001);
}

#[test]
fn a_rate_that_is_halved_midway_doubles_the_time_that_is_left() {
    for link in [LinkId::Host(HostId(0), Direction::Up), LinkId::Host(HostId(1), Direction::Down)] {
        let mut network = rack();
        network.set_rate(Time::from_secs_f64(0.2), link, 0.5);
        let (ends, _) = run(&mut network, &[transfer(0, 1, 5000)], 0.0);
        close(ends[0], 0.2 + 2.0 * 0.12, 0.01);
        let mut network = rack();
        network.set_rate(Time::from_secs_f64(0.1), link, 0.5);
        network.set_rate(Time::from_secs_f64(0.2), link, 1.0);
        close(run(&mut network, &[transfer(0, 1, 5000)], 0.0).0[0], 0.37, 0.01);
    }
}

#[test]
fn each_switch_but_the_first_adds_a_hop_and_other_links_stay_unused() {
    let mut network = tiers(
        "three-tier:hosts_per_edge=2,edges_per_aggregation=2,fill=packed,hop_us=3,core_gbit_per_s=50",
        8,
    );
    let mut dice = Prng::new(1);
    for (to, switches) in [(1, 0), (2, 2), (4, 4)] {
        let latency = Duration::from_micros(10 + 3 * switches);
        assert_eq!(network.latency(HostId(0), HostId(to), &mut dice), latency);
        let parcel = Parcel { from: HostId(0), to: HostId(to), flow: to as usize, bytes: FRAME };
        let start = Time(u64::from(to) * 1_000_000);
        let mut through = network.send_shared(start, parcel, 0, &mut dice);
        while through.is_none() {
            through = network.step();
        }
        let (_, passage) = through.unwrap();
        assert_eq!(passage.tail, start + Duration::from_micros(64) + latency);
    }
    let used: Vec<(LinkId, u64)> = network.traffic().iter().map(|used| (used.link, used.bytes)).collect();
    use Direction::{Down, Up};
    let frames = |link, frames: u64| (link, frames * 8000);
    let expected = [
        frames(LinkId::Host(HostId(0), Up), 3),
        frames(LinkId::Host(HostId(1), Down), 1),
        frames(LinkId::Host(HostId(2), Down), 1),
        frames(LinkId::Host(HostId(4), Down), 1),
        frames(LinkId::Edge(0, Up), 2),
        frames(LinkId::Edge(1, Down), 1),
        frames(LinkId::Edge(2, Down), 1),
        frames(LinkId::Aggregation(0, Up), 1),
        frames(LinkId::Aggregation(1, Down), 1),
        frames(LinkId::Core, 1),
    ];
    assert_eq!(used, expected);
}

#[test]
fn bad_numbers_are_named() {
    let config = NetworkConfig { latency_us: f64::NAN, ..Default::default() };
    assert!(config.check().unwrap_err().contains("network.latency_us"));
}

#[test]
fn gradients_count_as_often_as_is_said() {
    let push = Header::new(Kind::Push);
    let other = Header::new(Kind::Update);
    let network = |push_scale| Network::star(NetworkConfig { wire_scale: 10.0, push_scale, ..config() });
    let bytes = |network: &Network| [&push, &other].map(|header| network.wire_bytes(Some(header), 100));
    assert_eq!(bytes(&network(1.0)), [1344.0, 1344.0]);
    assert_eq!(bytes(&network(0.0)), [0.0, 1344.0]);
    let parcel = Parcel { from: HostId(0), to: HostId(1), flow: 0, bytes: 0.0 };
    assert!(!rack().shares_links(&parcel) && rack().shares_links(&Parcel { bytes: 1.0, ..parcel }));
}

#[test]
fn packets_have_headers_where_there_is_an_mtu() {
    // With the frame's own header, what 96 packets of Ethernet carry.
    let payload = 96 * 1448 - 64;
    let bytes = |mtu| Network::star(NetworkConfig { mtu, ..config() }).wire_bytes(None, payload);
    assert_eq!(bytes(0), 96.0 * 1448.0);
    close(bytes(1500), 96.0 * 1514.0, 1e-12);
    // Larger packets have fewer headers.
    close(bytes(9000), 96.0 * 1448.0 * 9014.0 / 8948.0, 1e-12);
}

#[test]
fn an_mtu_that_no_network_has_is_named() {
    let check = |mtu| NetworkConfig { mtu, ..config() }.check();
    assert!(check(52).unwrap_err().contains("network.mtu = 52: expected 576 to 65535, or 0"));
    assert!(check(65_536).is_err() && check(576).is_ok() && check(0).is_ok());
}
