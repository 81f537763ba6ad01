//! Tables that are lent as slabs: whose they are, and what arrives meanwhile. What partial pulling makes of them is in `psp`.

use super::bench::Bench;
use super::processes::worker;
use super::{W, job, started};
use paramill_core::policy::Axis;
use paramill_core::table::TableSpec;
use paramill_core::worker::{Gradient, Share, Slab, Ticket};

const ELEMENTS: usize = 40;

fn exchange(bench: &mut Bench, slabs: &mut Vec<Slab>, gradient: f32) -> Ticket {
    slabs.iter_mut().for_each(|slab| slab.gradient_mut().fill(gradient));
    let now = bench.now();
    let ticket = bench.worker_mut(0).exchange(now, slabs).expect("they fit");
    bench.worker_mut(0).clock();
    bench.run();
    ticket
}

/// The same, and the slabs are back.
fn exchanged(bench: &mut Bench, mut slabs: Vec<Slab>, gradient: f32) -> Vec<Slab> {
    let ticket = exchange(bench, &mut slabs, gradient);
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())), "{}", bench.explain(0, ticket));
    bench.worker_mut(0).redeem_slabs(ticket)
}

/// The slabs are back before the answer comes, which nobody waits for then.
fn given_up(bench: &mut Bench, mut slabs: Vec<Slab>, gradient: f32) -> Vec<Slab> {
    let (shard, worker) = (bench.shard_node(0), bench.worker_node(0));
    bench.world.hold(shard, worker);
    let ticket = exchange(bench, &mut slabs, gradient);
    assert_eq!(bench.outcome(0, ticket), None);
    let slabs = bench.worker_mut(0).redeem_slabs(ticket);
    bench.world.release(shard, worker);
    bench.run();
    slabs
}

/// The servers count on every difference that they sent: one that is dropped is missing for ever.
#[test]
fn differences_that_come_while_a_slab_is_lent_are_kept() {
    let mut config = job(1, 1, "bsp", "sgd:lr=1");
    config.policy = config.policy.with(Axis::AnswerCodec, "topk:1");
    let mut bench = started(config, 1, ELEMENTS);
    let slab = bench.worker_mut(0).slab(W).expect("nothing of it is under way");
    let slabs = exchanged(&mut bench, vec![slab], 1.0);
    assert_eq!(slabs[0].values(), bench.parameters(W, ELEMENTS));

    let slabs = given_up(&mut bench, slabs, 2.0);
    let mut slabs = exchanged(&mut bench, slabs, 4.0);
    assert_eq!(slabs[0].values(), bench.parameters(W, ELEMENTS));

    // What the application writes there is overwritten, and not added to.
    slabs[0].values_mut().fill(99.0);
    let slabs = exchanged(&mut bench, slabs, 8.0);
    assert_eq!(slabs[0].values(), bench.parameters(W, ELEMENTS));

    let slabs = given_up(&mut bench, slabs, 16.0);
    for slab in slabs {
        bench.worker_mut(0).give_back(slab).expect("it is of this worker");
    }
    assert_eq!(bench.worker(0).values(W), bench.parameters(W, ELEMENTS));
    let now = bench.now();
    let ticket =
        bench.worker_mut(0).push(now, W, Gradient::Dense(&[32.0; ELEMENTS]), true).expect("it is back");
    bench.worker_mut(0).clock();
    bench.run();
    assert_eq!(bench.outcome(0, ticket), Some(Ok(())));
    assert_eq!(bench.worker(0).values(W), bench.parameters(W, ELEMENTS));
    let expected: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 63.0).collect();
    assert_eq!(bench.parameters(W, ELEMENTS), expected, "no gradient was lost");
}

/// A codec that compares gradients with parameters finds them where they are: in the slab.
#[test]
fn significance_is_the_same_for_slabs_and_copies() {
    let run = |lent: bool| {
        let mut config = job(1, 1, "bsp", "sgd:lr=1");
        config.policy = config.policy.with(Axis::Codec, "significance:0.5,decay=false");
        let mut bench = started(config, 1, ELEMENTS);
        if lent {
            let slab = bench.worker_mut(0).slab(W).expect("nothing of it is under way");
            exchanged(&mut bench, vec![slab], 1.0);
        } else {
            let now = bench.now();
            bench.worker_mut(0).push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
            bench.run();
        }
        bench.parameters(W, ELEMENTS)
    };
    let copied = run(false);
    assert_eq!(copied[..4], [-1.0, 0.0, 2.0, 3.0], "1 is more than half of 0 and 1, but not of 2");
    assert_eq!(run(true), copied);
}

#[test]
fn a_slab_of_another_worker_is_refused_and_still_of_use_to_its_own() {
    let mut own = started(job(1, 1, "bsp", "sgd:lr=1"), 1, ELEMENTS);
    let mut other = Bench::without_workers(job(1, 1, "bsp", "sgd:lr=1"), 1, 0);
    other.add(worker(other.now(), 1, None, None));
    other.start(&[(TableSpec::dense("w", [8]), vec![0.0; 8])]);
    let mut slabs = vec![own.worker_mut(0).slab(W).expect("nothing of it is under way")];
    let now = other.now();
    let error = other.worker_mut(0).exchange(now, &mut slabs).expect_err("it was lent by another one");
    assert!(error.to_string().contains("was lent by another worker"), "{error}");
    let lent = other.worker_mut(0).slab(W).expect("it was not touched");
    let error = own.worker_mut(0).give_back(lent).expect_err("it was lent by another one");
    assert!(error.to_string().contains("was lent by another worker"), "{error}");

    let slabs = exchanged(&mut own, slabs, 1.0);
    assert_eq!(slabs[0].values(), own.parameters(W, ELEMENTS));
}

/// Two servers with four chunks each bring halves of the parameters side by side.
#[test]
fn shares_of_parameters_are_told_as_they_come_also_when_some_come_again() {
    const HALF: Share = Share { parts: 1, of: 2 };
    let mut bench = started(job(1, 2, "bsp", "sgd:lr=1"), 1, 64);
    let parts = bench.worker(0).answer_parts(W, 2).expect("it is a table");
    assert_eq!(parts, [[0..16, 32..48], [16..32, 48..64]]);
    let whole = bench.worker(0).answer_parts(W, 1).expect("it is a table");
    assert_eq!(
        (whole.len(), &whole[0][..]),
        (1, std::slice::from_ref(&(0..64))),
        "what is side by side is one range"
    );

    let mut slabs = vec![bench.worker_mut(0).slab(W).expect("nothing of it is under way")];
    let (worker, shards) = (bench.worker_node(0), [0, 1].map(|shard| bench.shard_node(shard)));
    for is_reset in [false, true] {
        shards.into_iter().for_each(|shard| bench.world.hold(shard, worker));
        let ticket = exchange(&mut bench, &mut slabs, 1.0);
        bench.deliver(shards[0], worker, 3);
        assert!(!bench.worker(0).has_share(ticket, HALF), "the other server has brought nothing");
        bench.deliver(shards[1], worker, 1);
        assert!(!bench.worker(0).has_share(ticket, HALF));
        bench.deliver(shards[1], worker, 1);
        assert!(bench.worker(0).has_share(ticket, HALF) && bench.outcome(0, ticket).is_none());
        if is_reset {
            bench.reset(shards[1], worker);
            bench.run();
        }
        bench.thaw();
        bench.pass(2.0);
        assert_eq!(bench.outcome(0, ticket), Some(Ok(())), "{}", bench.explain(0, ticket));
        slabs = bench.worker_mut(0).redeem_slabs(ticket);
        assert_eq!(slabs[0].values(), bench.parameters(W, 64));
    }
}
