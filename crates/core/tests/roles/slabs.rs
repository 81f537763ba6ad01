//! Tables that are lent as slabs: whose they are, what arrives meanwhile, and what partial pulling makes of them.

use super::pump::Pump;
use super::{W, job, started};
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::role::Role;
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, TableId};
use paramill_core::wire::control::frame;
use paramill_core::wire::{Change, Control, Kind};
use paramill_core::worker::{Gradient, Slab, Ticket};

const ELEMENTS: usize = 40;

fn exchange(pump: &mut Pump, slabs: &mut Vec<Slab>, gradient: f32) -> Ticket {
    slabs.iter_mut().for_each(|slab| slab.gradient_mut().fill(gradient));
    let now = pump.now;
    let ticket = pump.workers[0].exchange(now, slabs).expect("they fit");
    pump.workers[0].clock();
    pump.run();
    ticket
}

/// The same, and the slabs are back.
fn exchanged(pump: &mut Pump, mut slabs: Vec<Slab>, gradient: f32) -> Vec<Slab> {
    let ticket = exchange(pump, &mut slabs, gradient);
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())), "{}", pump.explain(0, ticket));
    pump.workers[0].redeem_slabs(ticket)
}

/// The slabs are back before the answer comes, which nobody waits for then.
fn given_up(pump: &mut Pump, mut slabs: Vec<Slab>, gradient: f32) -> Vec<Slab> {
    pump.hold(1, pump.worker_node(0));
    let ticket = exchange(pump, &mut slabs, gradient);
    assert_eq!(pump.outcome(0, ticket), None);
    let slabs = pump.workers[0].redeem_slabs(ticket);
    pump.release();
    pump.run();
    slabs
}

/// The servers count on every difference that they sent: one that is dropped is missing for ever.
#[test]
fn differences_that_come_while_a_slab_is_lent_are_kept() {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::AnswerCodec, "topk:1");
    let mut pump = started(config, 1, ELEMENTS);
    let slab = pump.workers[0].slab(W).expect("nothing of it is under way");
    let slabs = exchanged(&mut pump, vec![slab], 1.0);
    assert_eq!(slabs[0].values(), pump.parameters(W, ELEMENTS));

    let slabs = given_up(&mut pump, slabs, 2.0);
    let mut slabs = exchanged(&mut pump, slabs, 4.0);
    assert_eq!(slabs[0].values(), pump.parameters(W, ELEMENTS));

    // What the application writes there is overwritten, and not added to.
    slabs[0].values_mut().fill(99.0);
    let slabs = exchanged(&mut pump, slabs, 8.0);
    assert_eq!(slabs[0].values(), pump.parameters(W, ELEMENTS));

    let slabs = given_up(&mut pump, slabs, 16.0);
    for slab in slabs {
        pump.workers[0].give_back(slab).expect("it is of this worker");
    }
    assert_eq!(pump.workers[0].values(W), pump.parameters(W, ELEMENTS));
    let now = pump.now;
    let ticket = pump.workers[0].push(now, W, Gradient::Dense(&[32.0; ELEMENTS]), true).expect("it is back");
    pump.workers[0].clock();
    pump.run();
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())));
    assert_eq!(pump.workers[0].values(W), pump.parameters(W, ELEMENTS));
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 63.0).collect();
    assert_eq!(pump.parameters(W, ELEMENTS), expected, "no gradient was lost");
}

/// A codec that compares gradients with parameters finds them where they are: in the slab.
#[test]
fn significance_is_the_same_for_slabs_and_copies() {
    let run = |lent: bool| {
        let mut config = job(1, 1, "bsp", "sgd:lr=1");
        config.policy = config.policy.with(Axis::Codec, "significance:0.5,decay=false");
        let mut pump = started(config, 1, ELEMENTS);
        if lent {
            let slab = pump.workers[0].slab(W).expect("nothing of it is under way");
            exchanged(&mut pump, vec![slab], 1.0);
        } else {
            let now = pump.now;
            pump.workers[0].push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
            pump.run();
        }
        pump.parameters(W, ELEMENTS)
    };
    let copied = run(false);
    assert_eq!(copied[..4], [-1.0, 0.0, 2.0, 3.0], "1 is more than half of 0 and 1, but not of 2");
    assert_eq!(run(true), copied);
}

#[test]
fn a_slab_of_another_worker_is_refused_and_still_of_use_to_its_own() {
    let mut own = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    let mut other = started(job(1, 1, "bsp", "sgd:lr=1"), 1, 8);
    let mut slabs = vec![own.workers[0].slab(W).expect("nothing of it is under way")];
    let now = other.now;
    let error = other.workers[0].exchange(now, &mut slabs).expect_err("it was lent by another one");
    assert!(error.to_string().contains("was lent by another worker"), "{error}");
    let lent = other.workers[0].slab(W).expect("it was not touched");
    let error = own.workers[0].give_back(lent).expect_err("it was lent by another one");
    assert!(error.to_string().contains("was lent by another worker"), "{error}");

    let slabs = exchanged(&mut own, slabs, 1.0);
    assert_eq!(slabs[0].values(), own.parameters(W, ELEMENTS));
}

fn two_tables(sync: &str, lent: &str) -> Pump {
    let mut config = job(1, 2, sync, "sgd:lr=1");
    config.overrides = vec![PolicyOverride::new("lent", Policies::of([(Axis::Sync, lent)]))];
    config.policy = config.policy.with(Axis::Placement, "uniform");
    let mut pump = Pump::new(config, 1);
    pump.start(&["w", "lent"].map(|name| (TableSpec::dense(name, [ELEMENTS as u64]), vec![0.0; ELEMENTS])));
    pump
}

const LENT: TableId = TableId(1);

/// The other tables' fraction b is of their own blocks.
#[test]
fn what_is_lent_is_not_among_the_blocks_of_a_partial_pull() {
    let mut pump = two_tables("psp:c=1,b=0.5", "psp:c=1");
    let _slab = pump.workers[0].slab(LENT).expect("nothing of it is under way");
    pump.isolate(2);
    let now = pump.now;
    let ticket = pump.workers[0].push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
    pump.workers[0].clock();
    pump.run();
    assert_eq!(pump.outcome(0, ticket), Some(Ok(())), "one of two blocks is here");
}

#[test]
fn a_table_that_is_pulled_partially_is_not_lent() {
    let mut pump = two_tables("bsp", "psp:c=1,b=0.5");
    let error = pump.workers[0].slab(LENT).expect_err("b would have no effect").to_string();
    assert!(error.contains("table `lent` is pulled partially (psp with b = 0.5)"), "{error}");
    assert!(error.contains("use `push_pull`, or psp without b and tau2"), "{error}");
}

#[test]
fn what_is_lent_is_not_switched_to_partial_pulling() {
    let mut pump = two_tables("bsp", "bsp");
    let switch = Control::Set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "psp:c=1,b=0.5")])));
    let models = |pump: &mut Pump| {
        pump.command("test", &switch);
        let report = pump.shards[0].report(pump.now).expect("it has joined");
        report.tables.iter().map(|table| table.sync.clone()).collect::<Vec<_>>()
    };
    let slab = pump.workers[0].slab(LENT).expect("nothing of it is under way");
    pump.run();
    assert_eq!(models(&mut pump), ["bsp", "bsp"], "it was refused");
    // A switch that the coordinator agreed to before it heard of the loan.
    let Control::Set(rule) = &switch else { panic!("it is a command") };
    let told = Control::Change { epoch: 2, change: Change::Policy(rule.clone()) };
    let message = frame(Kind::Control, &told);
    let payload = message.body.bytes().expect("it has its bytes with it").to_vec();
    pump.workers[0].handle_frame(pump.now, NodeId::Coordinator.into(), &message.header, &payload);
    pump.run();
    let said = |line: &String| line.contains("table `lent` now uses psp:c=1,b=0.5; as long as it is lent");
    assert!(pump.log.iter().any(said), "{:?}", pump.log);

    pump.workers[0].give_back(slab).expect("it is of this worker");
    pump.run();
    assert_eq!(models(&mut pump), ["psp:c=1,b=0.5", "psp:c=1,b=0.5"]);
}
