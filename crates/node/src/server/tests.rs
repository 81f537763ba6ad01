use super::*;
use crate::client::{Job, JobOptions};
use crate::clock;
use crate::event_loop::Owned;
use crate::ports::PortSupply;
use crate::waker::Waker;
use paramill_core::server::{Shard, ShardConfig};
use paramill_core::table::TableSpec;
use paramill_core::types::ProcessId;

/// One of two interfaces is out of reach from the start: everybody goes on to the other one.
#[test]
fn a_dead_address_is_passed_over() {
    let registry = Arc::new(Registry::builtin());
    let job = JobConfig::new("test", 1, 1);
    let config = ServerConfig { coordinate: Some(job), cores: 0, ..ServerConfig::new("test", "127.0.0.1:0") };
    let tcp = ServerConfig { transport: Transport::Tcp, ..config.clone() };
    let mut server = start(config, &registry).expect("a coordinator");
    let (listeners, alive) = server
        .threads
        .data_listeners(&tcp, "unused", &mut PortSupply::new(None, 1).expect("no range"))
        .expect("loopback is always there");
    // Bound, so that nobody else gets it; not listening, so that everybody is refused.
    let dead = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    let any: std::net::SocketAddr = ([127, 0, 0, 2], 0).into();
    dead.bind(&any.into()).expect("a free port");
    let dead_address = dead.local_addr().expect("it is bound").as_socket().expect("an internet address");
    let addresses = [dead_address.to_string()].into_iter().chain(alive.iter().map(str::to_owned)).collect();
    let shard = ShardConfig {
        job: "test".into(),
        process: ProcessId(1),
        server: None,
        core: 0,
        cores: 1,
        addresses,
        coordinator: server.coordinator().to_owned(),
        digest_every: limits::DIGEST_EVERY,
    };
    let shard = Owned(Shard::new(clock::now(), shard, registry));
    let thread = Thread { name: "data core 0".into(), cpu: None, counted: None };
    server.threads.start(thread, listeners, shard, Waker::new().expect("a waker")).expect("a thread");

    let url = format!("paramill://{}/test", server.coordinator()).parse().expect("a URL");
    let job = Job::init(JobOptions::at(url)).expect("a worker");
    let table = job.table(TableSpec::dense("w", [100]), vec![1.0; 100]).expect("a table");
    job.start().expect("the other address leads to the server");
    assert_eq!(table.read(|values| values.to_vec()).expect("values"), [1.0; 100]);
    assert!(server.final_status().is_none(), "the job runs");
    job.close().expect("all is well");
    server.wait().expect("all is well");
    let last = server.final_status().expect("it coordinated the job");
    assert_eq!((last.phase.as_str(), last.workers.len()), ("over: all workers left", 1));
}

#[test]
fn an_address_of_version_6_is_announced_in_brackets() {
    let listener = tcp::listen("127.0.0.1:0").expect("loopback is always there");
    let port = listener.local_addr().expect("it is bound").port();
    let told = |host| announced(&listener, Some(host)).expect("it is bound");
    assert_eq!(told("::1"), format!("[::1]:{port}"));
    assert_eq!(told("[2001:db8::1]"), format!("[2001:db8::1]:{port}"));
    assert_eq!(told("node7"), format!("node7:{port}"));
    // All addresses together are none that others could connect to, however they are written.
    for any in ["::", "[::]", "0.0.0.0"] {
        assert_eq!(told(any), format!("127.0.0.1:{port}"), "{any}");
    }
}

/// Every data core has the next port that is free on all of its hosts; a port that another program has on one of them is
/// passed over.
#[test]
fn data_cores_listen_on_the_ports_that_were_asked_for() {
    // Ports that were free a moment ago: another program may have taken one since, which is passed over as well.
    let taken = TcpListener::bind("127.0.0.2:0").expect("loopback is always there");
    let first = taken.local_addr().expect("it is bound").port();
    let ports = format!("{first}-{}", first.saturating_add(20)).parse().expect("a range");
    let job = JobConfig::new("test", 1, 1);
    let config = ServerConfig {
        coordinate: Some(job),
        hosts: vec!["127.0.0.1".into(), "127.0.0.2".into()],
        ports: Some(ports),
        cores: 2,
        transport: Transport::Tcp,
        ..ServerConfig::new("test", "127.0.0.1:0")
    };
    let server = start(config, &Arc::new(Registry::builtin())).expect("enough ports");
    let port = |address: &str| address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    let bound: Vec<Vec<u16>> =
        server.data_addresses().iter().map(|core| core.iter().filter_map(port).collect()).collect();
    assert_eq!(bound.len(), 2);
    for core in &bound {
        assert!(core.len() == 2 && core[0] == core[1], "one port on both hosts: {bound:?}");
        assert!(first < core[0] && core[0] <= first.saturating_add(20), "{bound:?} with {first} taken");
    }
    assert!(bound[0][0] < bound[1][0], "in order: {bound:?}");
}
