//! Whole jobs over a three-tier network.

use paramill_core::types::{NodeId, ServerId, ShardId, WorkerId};
use paramill_sim::network::Position;
use paramill_sim::report::{LinkTraffic, Report, run_scenario};
use paramill_sim::scenario::{Hosts, Scenario};

/// Four workers and two servers in racks of three, as they are dealt out: a server and two workers in each. A table of 4 MB, on server 0.
fn scenario(network: &str) -> Scenario {
    let text = format!(
        "workers = 4\nservers = 2\niterations = 5\n[[tables]]\nname = 'w'\nshape = [1000000]\n\
         [compute]\nstep_ms = 1\njitter = 0\n[network]\ngbit_per_s = 1\njitter_us = 0\n{network}"
    );
    Scenario::parse(&text).expect("the scenario can be run")
}

fn run(network: &str) -> Report {
    let report = run_scenario(&scenario(network)).expect("the scenario can be run");
    assert!(report.finished, "{report:?}");
    report
}

fn used<'a>(report: &'a Report, link: &str) -> &'a LinkTraffic {
    report
        .traffic
        .iter()
        .find(|traffic| traffic.link == link)
        .unwrap_or_else(|| panic!("{:?}", report.traffic))
}

const TIERS: &str = "topology = 'three-tier:hosts_per_edge=3,edges_per_aggregation=1";

#[test]
fn a_job_ends_with_the_same_bits_over_every_network() {
    let star = run("");
    let tiers = run(&format!("{TIERS}'"));
    let narrow = run(&format!("{TIERS},edge_oversubscription=10'"));
    for other in [&tiers, &narrow] {
        assert_eq!(other.tables, star.tables);
    }
    assert_eq!(star.network, "star: 7 hosts of 1 Gbit/s");
    assert_eq!(
        narrow.network,
        "three-tier: 2 racks of 3 hosts of 1 Gbit/s, edge uplinks of 0.3 Gbit/s; 2 aggregation switches for 1 racks \
         each, uplinks of 0.3 Gbit/s"
    );
    // Small windows make a star fair, too: with large ones a server answers one worker after the other.
    let fair_star = run("window_bytes = 100000");
    let ratio = tiers.seconds / fair_star.seconds;
    assert!((0.98..1.02).contains(&ratio), "{} and {} s", tiers.seconds, fair_star.seconds);
    // In every iteration the two workers of rack 1 push the table to rack 0, and get it from there.
    let iteration = 2.0 * (2.0 * 4e6 * 8.0 / 0.3e9);
    let waited = narrow.workers[1].waited_s;
    assert!((5.0 * iteration..5.05 * iteration).contains(&waited), "{waited} s, bound {}", 5.0 * iteration);
    // The initial values came before, over the same links.
    for (link, tables) in
        [("edge=0:down", 10), ("aggregation=1:up", 10), ("edge=0:up", 12), ("aggregation=1:down", 12)]
    {
        let LinkTraffic { bytes, busy_s, .. } = used(&narrow, link);
        let payload = tables * 4_000_000;
        assert!((payload..payload + payload / 100).contains(bytes), "{link}: {bytes} bytes");
        assert!((busy_s - *bytes as f64 * 8.0 / 0.3e9).abs() < 1e-3, "{link}: {busy_s} s");
    }
    assert_eq!(narrow.traffic[0].link.split('=').next(), Some("edge"), "{:?}", narrow.traffic[0]);
}

#[test]
fn the_same_seed_gives_the_same_run_with_everything_that_shares_links() {
    let network = format!(
        "{TIERS}'\n[[network.background]]\nfrom = 'edge=0'\nto = 'edge=1'\nflows = 3\nuntil_s = 0.5\n\
         [[network.background]]\nfrom = 'worker=1'\nto = 'server=1'\ngbit_per_s = 0.2\nfrom_s = 0.1\n\
         [[network.changes]]\nat_s = 0.2\nlink = 'edge=*'\ngbit_per_s = 0.5\n"
    );
    let scenario = Scenario { faults: vec!["link:reset,p=0.001".into()], ..scenario(&network) };
    let report = run_scenario(&scenario).unwrap();
    assert_eq!(report, run_scenario(&scenario).unwrap());
    assert!(report.finished && used(&report, "background=0:from:up").bytes > 0, "{report:?}");
    assert_eq!(report.tables, run("").tables);
}

#[test]
fn others_and_slower_links_take_their_time() {
    let alone = run(&format!("{TIERS}'")).seconds;
    let shared = format!("{TIERS}'\n[[network.background]]\nfrom = 'edge=0'\nto = 'server=0'\nflows = 4\n");
    let pushed_with_others = run(&shared).seconds;
    assert!(pushed_with_others > 1.3 * alone, "{pushed_with_others} and {alone} s");
    let slower = format!("{TIERS}'\n[[network.changes]]\nat_s = 0\nlink = 'server=*'\ngbit_per_s = 0.25\n");
    let ratio = run(&slower).seconds / alone;
    assert!((3.5..4.1).contains(&ratio), "{ratio} times as long");
}

#[test]
fn nodes_are_where_the_scenario_puts_them() {
    let server = |server| NodeId::Shard(ShardId { server: ServerId(server), core: 0 });
    let worker = |rank| NodeId::Worker(WorkerId(rank));
    let at = |edge| Position { edge, aggregation: edge / 2 };
    let dealt = scenario("topology = 'three-tier:hosts_per_edge=2'");
    let hosts = Hosts::of(&dealt).unwrap();
    assert_eq!([server(0), server(1), worker(0)].map(|node| hosts.position(node)), [at(0), at(1), at(2)]);
    assert_eq!(hosts.position(worker(1)), at(0));
    let named = scenario(
        "topology = 'three-tier:hosts_per_edge=2'\n\
         [[network.racks]]\nhosts = [['server=1'], ['worker=3', 'coordinator']]\n\
         [[network.racks]]\nhosts = []\n[[network.racks]]\nhosts = []\n\
         [[network.racks]]\nhosts = [['server=0', 'worker=0']]\n",
    );
    let hosts = Hosts::of(&named).unwrap();
    let placed = [server(1), worker(3), NodeId::Coordinator, server(0), worker(0)];
    assert_eq!(placed.map(|node| hosts.position(node)), [at(0), at(0), at(0), at(3), at(3)]);
    assert_eq!(hosts.host(server(0)), hosts.host(worker(0)));
    assert_ne!(hosts.host(server(1)), hosts.host(worker(3)));
    let report = run_scenario(&named).unwrap();
    assert_eq!(report.tables, run("").tables);
    assert!(used(&report, "server=0:up").bytes > 0, "{:?}", report.traffic);
    assert!(
        report.traffic.iter().all(|traffic| !traffic.link.starts_with("worker=0:")),
        "a shared host has one name"
    );
}

#[test]
fn what_does_not_fit_is_named_with_its_remedy() {
    let table = "[[tables]]\nname = 'w'\nshape = [1]\n";
    for (network, expected) in [
        ("topology = 'tree'", "network.topology: unknown topology `tree`; known: star, three-tier"),
        ("topology = 'three-tier'\nhosts = 3", "unknown field `hosts`"),
        ("[[network.racks]]\nhosts = []", "set network.topology = \"three-tier\""),
        ("[[network.changes]]\nat_s = 1\nlink = 'edge=0'\ngbit_per_s = 1", "a star has no racks"),
        (
            "topology = 'three-tier'\n[[network.racks]]\nhosts = [['worker=9']]",
            "`worker=9`: there are 4 of this kind",
        ),
        (
            "topology = 'three-tier'\n[[network.racks]]\nhosts = [['client=1']]",
            "expected `server=N`, `worker=N`",
        ),
        (
            "topology = 'three-tier'\n[[network.racks]]\nhosts = [['worker=1'], ['worker=1']]",
            "`worker=1` is placed twice",
        ),
        ("topology = 'three-tier'\n[[network.racks]]\nhosts = [[]]", "a host without a node"),
        ("topology = 'three-tier'\n[[network.racks]]\nhosts = []\nname = 'a'", "unknown field `name`"),
        (
            "topology = 'three-tier'\n[[network.background]]\nfrom = 'edge=7'\nto = 'server=0'",
            "`edge=7`: expected `edge=0`",
        ),
        (
            "topology = 'three-tier'\n[[network.background]]\nfrom = 'server=0'\nto = 'server=0'",
            "are one host",
        ),
        (
            "topology = 'three-tier'\n[[network.background]]\nfrom = 'server=0'\nto = 'server=1'\nfrom_s = 2\nuntil_s = 1",
            "expected 0 <= from_s < until_s",
        ),
        (
            "topology = 'three-tier'\ngbit_per_s = 0\n[[network.background]]\nfrom = 'server=0'\nto = 'server=1'",
            "needs links with a rate; set network.gbit_per_s",
        ),
        (
            "topology = 'three-tier'\n[[network.background]]\nfrom = 'server=0'\nto = 'server=1'\ngbit_per_s = 0",
            "leave it out for a flow that takes what it can",
        ),
        (
            "topology = 'three-tier'\n[[network.changes]]\nat_s = 1\nlink = 'rack=0'\ngbit_per_s = 1",
            "network.changes.link: `rack=0`: expected `server=N`",
        ),
        (
            "topology = 'three-tier'\n[[network.changes]]\nat_s = 1\nlink = 'core'\ngbit_per_s = 1",
            "give the topology a `core_gbit_per_s`",
        ),
        (
            "topology = 'three-tier'\n[[network.changes]]\nat_s = 1\nlink = 'aggregation=1:up'\ngbit_per_s = 1",
            "there is one aggregation, number 0",
        ),
        (
            "topology = 'three-tier'\n[[network.changes]]\nat_s = 1\nlink = 'edge=0'\ngbit_per_s = 0",
            "network.changes.gbit_per_s = 0: expected 1e-6 to 1e6",
        ),
    ] {
        let error = Scenario::parse(&format!("{table}[network]\n{network}")).unwrap_err().to_string();
        assert!(error.contains(expected), "{network}: {error}");
    }
}

/// The example of the manual.
#[test]
fn the_example_runs_and_says_what_its_comments_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/scenarios/three-tier.toml");
    let scenario = Scenario::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    let report = run_scenario(&scenario).unwrap();
    assert!(report.finished && report.seconds > 4.0, "{report:?}");
    assert_eq!(
        report.network,
        "three-tier: 4 racks of 4 hosts of 1 Gbit/s, edge uplinks of 2 Gbit/s; 2 aggregation switches for 2 racks each, \
         uplinks of 4 Gbit/s"
    );
    assert!(used(&report, "background=0:from:up").bytes > 50_000_000, "{:?}", report.traffic);
}

#[test]
fn a_scenario_with_a_network_is_written_as_it_is_read() {
    let scenario = scenario(
        "topology = 'three-tier:edge_oversubscription=4'\n[[network.racks]]\nhosts = [['server=1'], ['worker=3']]\n\
         [[network.background]]\nfrom = 'edge=0'\nto = 'worker=0'\nuntil_s = 3\n\
         [[network.changes]]\nat_s = 1\nlink = 'edge=0:up'\ngbit_per_s = 0.5\n",
    );
    assert_eq!(Scenario::parse(&toml::to_string(&scenario).unwrap()), Ok(scenario));
}
