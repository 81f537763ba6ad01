//! PSP-SGD between the roles, in virtual time: partial pushing and partial pulling (Algorithm 1), for tables that are pushed and
//! pulled and for slabs that are exchanged alike.

use crate::bench::Bench;
use crate::{W, job, started};
use paramill_core::coordinator::JobConfig;
use paramill_core::limits::MAX_CLOCKS_UNACKNOWLEDGED;
use paramill_core::policy::{Axis, Policies, PolicyOverride};
use paramill_core::table::TableSpec;
use paramill_core::types::{NodeId, ServerId, TableId};
use paramill_core::worker::{Gradient, Slab, Ticket};

const ELEMENTS: usize = 32;
/// The last element, which is on the last server, and its initial value.
const LAST: usize = ELEMENTS - 1;
const INITIAL: f32 = LAST as f32;

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Tables,
    Slabs,
}

/// A job whose workers push the same gradient everywhere.
struct Run {
    bench: Bench,
    /// Of each worker, while its application has them.
    slabs: Vec<Vec<Slab>>,
    how: How,
}

impl Run {
    fn new(config: JobConfig, cores: u32, how: How) -> Run {
        Run::of(started(config, cores, ELEMENTS), how, &[W])
    }

    fn of(mut bench: Bench, how: How, lent: &[TableId]) -> Run {
        let mut slabs = Vec::new();
        for index in 0..bench.worker_count() {
            let worker = bench.worker_mut(index);
            let of_worker = lent.iter().filter(|_| how == How::Slabs).map(|&table| worker.slab(table));
            slabs.push(of_worker.collect::<Result<_, _>>().expect("nothing is under way"));
        }
        Run { bench, slabs, how }
    }

    /// Pushes a gradient, asks for parameters and ends the iteration. `None` while the last exchange has the slab.
    fn try_iterate(&mut self, worker: usize, gradient: &[f32]) -> Option<Ticket> {
        let now = self.bench.now();
        let (role, slabs) = (self.bench.worker_mut(worker), &mut self.slabs[worker]);
        let ticket = match self.how {
            How::Tables => role.push(now, W, Gradient::Dense(gradient), true),
            How::Slabs if slabs.is_empty() => return None,
            How::Slabs => {
                slabs.iter_mut().for_each(|slab| slab.gradient_mut().copy_from_slice(gradient));
                role.exchange(now, slabs)
            }
        };
        role.clock();
        self.bench.run();
        Some(ticket.expect("it fits"))
    }

    fn iterate(&mut self, worker: usize) -> Ticket {
        self.try_iterate(worker, &[1.0; ELEMENTS]).expect("the slab is here")
    }

    fn is_due(&mut self, worker: usize, ticket: Ticket) -> bool {
        self.bench.outcome(worker, ticket).inspect(|outcome| assert_eq!(*outcome, Ok(()))).is_some()
    }

    /// Waits for an iteration, which is due, and goes on with its parameters.
    fn go_on(&mut self, worker: usize, ticket: Ticket) -> Vec<f32> {
        let why = self.bench.explain(worker, ticket);
        assert!(self.is_due(worker, ticket), "{:?}: {why}", self.how);
        if self.how == How::Slabs {
            self.slabs[worker] = self.bench.worker_mut(worker).redeem_slabs(ticket);
        }
        self.values(worker)
    }

    /// The parameters that the application of a worker computes with.
    fn values(&self, worker: usize) -> Vec<f32> {
        match self.how {
            How::Tables => self.bench.worker(worker).values(W).to_vec(),
            How::Slabs => self.slabs[worker][0].values().to_vec(),
        }
    }

    fn parameters(&self) -> Vec<f32> {
        self.bench.parameters(W, ELEMENTS)
    }
}

/// Both ways of bringing gradients and parameters.
fn both(test: impl Fn(How)) {
    [How::Tables, How::Slabs].into_iter().for_each(test);
}

// Worker, lines 3 to 15.

#[test]
fn a_worker_goes_on_tau2_after_enough_blocks_and_not_before() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5,tau2=1", "sgd:lr=1"), 1, how);
        run.bench.isolate(run.bench.shard_node(1));
        let ticket = run.iterate(0);
        assert!(!run.is_due(0, ticket), "half of the blocks are here, tau2 runs");
        run.bench.pass(0.999_999);
        assert!(!run.is_due(0, ticket), "just before the boundary");
        run.bench.pass(0.000_001);
        let values = run.go_on(0, ticket);
        assert_eq!((values[0], values[LAST]), (-1.0, INITIAL), "a missing block keeps its value");
    });
}

#[test]
fn all_blocks_end_the_wait_before_tau2_does() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5,tau2=1", "sgd:lr=1"), 1, how);
        let (shard, worker) = (run.bench.shard_node(1), run.bench.worker_node(0));
        run.bench.world.hold(shard, worker);
        let ticket = run.iterate(0);
        run.bench.pass(0.5);
        assert!(!run.is_due(0, ticket));
        run.bench.world.release(shard, worker);
        run.bench.run();
        assert_eq!(run.go_on(0, ticket), run.parameters());
    });
}

#[test]
fn blocks_of_an_iteration_that_is_over_are_dropped_and_no_push_is_lost() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1"), 1, how);
        run.bench.isolate(run.bench.shard_node(1));
        for _ in 0..3 {
            let ticket = run.iterate(0);
            assert_eq!(run.go_on(0, ticket)[LAST], INITIAL);
        }
        run.bench.heal();
        run.bench.pass(2.0);
        assert_eq!(run.parameters()[LAST], INITIAL - 3.0, "every push was applied once");
        let expected = match how {
            How::Tables => INITIAL - 3.0,
            // Nobody writes to memory that the application has.
            How::Slabs => INITIAL,
        };
        assert_eq!(run.values(0)[LAST], expected, "only the newest block was taken");
        let ticket = run.iterate(0);
        assert_eq!(run.go_on(0, ticket), run.parameters());
    });
}

/// A late block comes while the worker waits for the next ones: it is older than the worker's clock.
#[test]
fn a_block_of_the_iteration_before_is_dropped_while_the_next_one_is_waited_for() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5,tau2=1", "sgd:lr=1"), 1, how);
        let (shards, worker) = ([0, 1].map(|shard| run.bench.shard_node(shard)), run.bench.worker_node(0));
        run.bench.world.hold(shards[1], worker);
        let ticket = run.iterate(0);
        run.bench.pass(1.0);
        run.go_on(0, ticket);
        run.bench.world.hold(shards[0], worker);
        let ticket = run.iterate(0);
        // The whole answer of the first iteration: an acknowledgement and two chunks.
        let frames = run.bench.world.unread(shards[1], worker).count() / 2;
        run.bench.deliver(shards[1], worker, frames);
        assert!(!run.is_due(0, ticket), "a block that is dropped is none of those that were waited for");
        run.bench.deliver(shards[0], worker, 100);
        run.bench.pass(1.0);
        let values = run.go_on(0, ticket);
        assert_eq!((values[0], values[LAST]), (-2.0, INITIAL));
        run.bench.thaw();
        assert_eq!(run.parameters()[LAST], INITIAL - 2.0);
    });
}

/// A server that is ahead answers an old request with parameters that are new enough for the iteration at hand.
#[test]
fn a_late_answer_counts_if_its_version_is_not_too_old() {
    both(|how| {
        let mut run = Run::new(job(2, 2, "psp:c=1,b=0.5", "sgd:lr=2"), 1, how);
        let (shard, slow) = (run.bench.shard_node(1), run.bench.worker_node(0));
        run.bench.world.hold(slow, shard);
        let ticket = run.iterate(0);
        run.go_on(0, ticket);
        for _ in 0..3 {
            let ticket = run.iterate(1);
            run.go_on(1, ticket);
        }
        run.bench.world.release(slow, shard);
        run.bench.run();
        // The next iteration hears nothing of that server.
        run.bench.cut(shard, slow);
        let ticket = run.iterate(0);
        let values = run.go_on(0, ticket);
        assert_eq!(values[LAST], INITIAL - 3.0, "{how:?}: the three rounds of the other worker");
        assert_eq!(run.parameters()[LAST], INITIAL - 3.0);
    });
}

/// Frames of a late answer are not written. Where another model wants late answers, the rest of this one does not make it whole.
#[test]
fn half_an_answer_that_was_late_is_none_after_a_switch() {
    const ALL: usize = usize::MAX;
    for delivered in 0..6 {
        let mut config = job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1");
        config.policy = config.policy.with(Axis::Chunk, "16B").with(Axis::AnswerCodec, "bitmap+snappy");
        let mut run = Run::new(config, 1, How::Tables);
        let (worker, first, second) =
            (run.bench.worker_node(0), run.bench.shard_node(0), run.bench.shard_node(1));
        run.bench.freeze();
        run.iterate(0);
        run.bench.deliver(worker, second, ALL);
        run.bench.deliver(worker, first, ALL);
        run.bench.deliver(first, worker, ALL);
        run.iterate(0);
        run.bench.deliver(second, worker, delivered);
        run.bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "asp")])));
        for node in [first, second, worker].repeat(3) {
            run.bench.deliver(NodeId::Coordinator, node, ALL);
            run.bench.deliver(node, NodeId::Coordinator, ALL);
        }
        let report = run.bench.shard(1).report(run.bench.now()).expect("it has the plan");
        assert_eq!(report.tables[0].sync, "asp", "the switch is made");
        run.bench.deliver(second, worker, ALL);
        let steps: Vec<f32> =
            (ELEMENTS / 2..ELEMENTS).map(|i| i as f32 - run.bench.worker(0).values(W)[i]).collect();
        assert!(
            steps.iter().all(|step| *step == steps[0]),
            "{delivered} frames before the switch: {steps:?}"
        );
    }
}

#[test]
fn nothing_is_written_to_a_slab_that_the_application_has() {
    let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1"), 1, How::Slabs);
    let (shard, worker) = (run.bench.shard_node(1), run.bench.worker_node(0));
    let addresses = |run: &Run| {
        let slab = &run.slabs[0][0];
        (slab.gradient().as_ptr(), slab.values().as_ptr())
    };
    let before = addresses(&run);
    for step in 1..=4 {
        run.bench.world.hold(shard, worker);
        let ticket = run.iterate(0);
        let values = run.go_on(0, ticket);
        assert_eq!(values[0], -(step as f32));
        // One frame of the answer, and then the rest, with the application computing.
        for frames in [1, 100] {
            run.bench.deliver(shard, worker, frames);
            assert_eq!(run.values(0), values, "step {step}");
        }
        run.bench.world.release(shard, worker);
        assert_eq!(addresses(&run), before, "and its memory stays where it is");
        assert!(run.slabs[0][0].gradient().iter().all(|&value| value == 1.0));
    }
    let memory = run.bench.worker(0).memory_bytes();
    for _ in 0..50 {
        run.bench.world.hold(shard, worker);
        let ticket = run.iterate(0);
        run.go_on(0, ticket);
        run.bench.world.release(shard, worker);
        run.bench.run();
    }
    assert!(run.bench.worker(0).memory_bytes() <= memory, "memory does not grow");
    let slab = run.slabs[0].pop().expect("it is here");
    run.bench.worker_mut(0).give_back(slab).expect("it is of this worker");
    run.bench.run();
    run.how = How::Tables;
    let ticket = run.iterate(0);
    assert_eq!(run.go_on(0, ticket), run.parameters());
}

/// With b = 1 there is no partial pulling: an answer is taken also where the application did not wait for it. Answers that
/// are differences need that.
#[test]
fn with_all_blocks_no_answer_is_dropped() {
    let run = |sync: &str, answer_codec: &str| {
        let mut config = job(2, 2, sync, "sgd:lr=1");
        config.policy.set(Axis::AnswerCodec, answer_codec).unwrap();
        let mut run = Run::new(config, 2, How::Tables);
        run.iterate(0);
        run.iterate(0);
        run.iterate(1);
        assert_ne!(run.values(0)[0], 0.0, "{sync}, {answer_codec}");
        assert_eq!(run.values(0), run.parameters(), "{sync}, {answer_codec}");
        run.iterate(1);
        assert_eq!(run.values(0), run.parameters(), "{sync}, {answer_codec}");
    };
    for answer_codec in ["none", "threshold:0.1"] {
        run("psp:c=2", answer_codec);
        run("bsp", answer_codec);
    }
}

#[test]
fn gradients_under_way_do_not_pile_up() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5", "sgd:lr=1"), 1, how);
        run.bench.isolate(run.bench.shard_node(1));
        let due = (0..20)
            .take_while(|_| {
                let ticket = run.iterate(0);
                let is_due = run.is_due(0, ticket);
                is_due.then(|| run.go_on(0, ticket)).is_some()
            })
            .count();
        assert_eq!(due, MAX_CLOCKS_UNACKNOWLEDGED);
    });
}

#[test]
fn a_push_that_a_server_refuses_fails_the_exchange_that_waits_for_it() {
    both(|how| {
        let mut run = Run::new(job(1, 2, "psp:c=1,b=0.5,tau2=1", "sgd:lr=1"), 1, how);
        let mut gradient = [1.0; ELEMENTS];
        gradient[LAST] = f32::NAN;
        if how == How::Tables {
            let now = run.bench.now();
            assert!(run.bench.worker_mut(0).push(now, W, Gradient::Dense(&gradient), true).is_err());
            return;
        }
        let ticket = run.try_iterate(0, &gradient).expect("the slab is here");
        let error = run.bench.outcome(0, ticket).expect("it is over").expect_err("it was refused");
        assert!(error.to_string().contains("NaN or Inf"), "{error}");
    });
}

// Server, lines 4 to 13.

#[test]
fn a_round_closes_with_c_gradients_and_a_late_one_is_dropped() {
    both(|how| {
        let mut run = Run::new(job(3, 1, "psp:c=2", "sgd:lr=3"), 1, how);
        let tickets = [run.iterate(0), run.iterate(1)];
        (0..2).for_each(|worker| _ = run.go_on(worker, tickets[worker]));
        // Linear scaling: two of three workers make two thirds of the learning rate.
        assert_eq!(run.parameters()[0], -2.0);
        let late = run.iterate(2);
        run.go_on(2, late);
        assert_eq!(run.parameters()[0], -2.0, "its gradient is dropped");
        assert_eq!(run.bench.shard(0).report(run.bench.now()).unwrap().tables[0].stats.dropped, 1);
    });
}

#[test]
fn a_server_waits_tau1_for_more_gradients_and_not_longer() {
    both(|how| {
        let mut run = Run::new(job(3, 1, "psp:c=1,tau1=1", "sgd:lr=3"), 1, how);
        let tickets = [run.iterate(0), run.iterate(1)];
        run.bench.pass(0.999_999);
        assert!(!run.is_due(0, tickets[0]) && !run.is_due(1, tickets[1]));
        run.bench.pass(0.000_001);
        (0..2).for_each(|worker| _ = run.go_on(worker, tickets[worker]));
        assert_eq!(run.parameters()[0], -2.0, "both gradients count");
    });
}

#[test]
fn c_of_all_workers_and_all_blocks_is_bsp_bit_for_bit() {
    let run = |sync: &str, how: How| {
        let mut run = Run::new(job(3, 2, sync, "momentum:lr=0.1"), 2, how);
        for step in 0..5 {
            let tickets = [2, 0, 1].map(|worker| {
                let gradient: Vec<f32> =
                    (0..ELEMENTS).map(|i| ((i * 7 + worker * 13 + step * 5) as f32 / 11.0).sin()).collect();
                (worker, run.try_iterate(worker, &gradient).expect("the slab is here"))
            });
            for (worker, ticket) in tickets {
                assert_eq!(run.go_on(worker, ticket), run.parameters());
            }
        }
        run.parameters().iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    both(|how| {
        assert_eq!(run("psp:c=3,b=1", how), run("bsp", How::Tables));
        assert_eq!(run("psp:c=3,b=100%,tau1=1,tau2=1", how), run("bsp", How::Tables));
        // Every block comes in time.
        assert_eq!(run("psp:c=3,b=0.5,tau2=1", how), run("bsp", How::Tables));
    });
}

// Jobs of several tables, and servers with rules of their own.

const OTHER: TableId = TableId(1);

/// Tables on two servers, the second under another model.
fn two_tables(sync: &str, other: &str) -> Bench {
    let mut config = job(1, 2, sync, "sgd:lr=1");
    config.overrides = vec![PolicyOverride::new("other", Policies::of([(Axis::Sync, other)]))];
    let mut bench = Bench::new(config, 1);
    bench.start(&["w", "other"].map(|name| (TableSpec::dense(name, [ELEMENTS as u64]), vec![0.0; ELEMENTS])));
    bench
}

#[test]
fn an_exchange_waits_for_all_of_those_tables_that_are_not_pulled_partially() {
    let mut run = Run::of(two_tables("psp:c=1,b=0.5", "bsp"), How::Slabs, &[W, OTHER]);
    let (shard, worker) = (run.bench.shard_node(1), run.bench.worker_node(0));
    run.bench.world.hold(shard, worker);
    let ticket = run.iterate(0);
    assert!(!run.is_due(0, ticket), "half of `w` is enough, and half of `other` is not");
    run.bench.thaw();
    run.go_on(0, ticket);
    assert_eq!(run.slabs[0][1].values(), run.bench.parameters(OTHER, ELEMENTS));
}

#[test]
fn blocks_of_slabs_and_of_tables_count_together() {
    let mut run = Run::of(two_tables("psp:c=1,b=0.75", "psp:c=1,b=0.75"), How::Slabs, &[OTHER]);
    let (shard, worker) = (run.bench.shard_node(1), run.bench.worker_node(0));
    run.bench.world.hold(shard, worker);
    let now = run.bench.now();
    let (role, slabs) = (run.bench.worker_mut(0), &mut run.slabs[0]);
    let pushed = role.push(now, W, Gradient::Dense(&[1.0; ELEMENTS]), true).expect("it fits");
    let exchanged = role.exchange(now, slabs).expect("it fits");
    role.clock();
    run.bench.run();
    assert!(!run.is_due(0, pushed) && !run.is_due(0, exchanged), "two of four blocks are here");
    let frames = run.bench.world.unread(shard, worker).count();
    run.bench.deliver(shard, worker, frames / 2);
    assert!(run.is_due(0, pushed) && run.is_due(0, exchanged), "three of four are");
}

#[test]
fn a_table_that_is_not_exchanged_holds_up_nobody() {
    for how in [How::Tables, How::Slabs] {
        let mut run = Run::of(two_tables("psp:c=1,b=0.5", "psp:c=1,b=0.5"), how, &[W]);
        run.bench.isolate(run.bench.shard_node(1));
        for _ in 0..3 {
            let ticket = run.iterate(0);
            run.go_on(0, ticket);
        }
    }
}

#[test]
fn a_table_that_is_lent_is_switched_to_partial_pulling_and_back() {
    let mut run = Run::new(job(1, 2, "bsp", "sgd:lr=1"), 1, How::Slabs);
    let set = |run: &mut Run, sync: &str| {
        run.bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, sync)])))
    };
    let (shard, worker) = (run.bench.shard_node(1), run.bench.worker_node(0));
    set(&mut run, "psp:c=1,b=0.5");
    run.bench.world.hold(shard, worker);
    let ticket = run.iterate(0);
    run.go_on(0, ticket);
    set(&mut run, "psp:c=1");
    let ticket = run.iterate(0);
    assert!(!run.is_due(0, ticket), "now all blocks are waited for");
    run.bench.thaw();
    assert_eq!(run.go_on(0, ticket), run.parameters());
}

#[test]
fn a_switch_for_one_server_holds_for_its_blocks() {
    both(|how| {
        let mut run = Run::new(job(1, 4, "psp:c=1", "sgd:lr=1"), 1, how);
        for server in [2, 3] {
            let rule = PolicyOverride::new("*", Policies::of([(Axis::Sync, "psp:c=1,b=0.5,tau2=1")]));
            run.bench.set(PolicyOverride { server: Some(ServerId(server)), ..rule });
        }
        let (shards, worker) =
            ([0, 1, 2, 3].map(|shard| run.bench.shard_node(shard)), run.bench.worker_node(0));
        // Of servers 2 and 3 one is enough, and of the others both are needed.
        for (held, due) in [(0, false), (3, true)] {
            run.bench.world.hold(shards[held], worker);
            let ticket = run.iterate(0);
            assert!(!run.is_due(0, ticket), "tau2 runs");
            run.bench.pass(1.0);
            assert_eq!(run.is_due(0, ticket), due, "without server {held}");
            if due {
                let values = run.go_on(0, ticket);
                assert_eq!((values[0], values[LAST]), (-2.0, INITIAL - 1.0));
            } else {
                run.bench.world.release(shards[held], worker);
                run.bench.run();
                assert_eq!(run.go_on(0, ticket), run.parameters());
            }
        }
    });
}

/// The operator helps a job that waits for servers which stand still.
#[test]
fn a_switch_holds_for_blocks_that_are_waited_for() {
    both(|how| {
        let mut run = Run::new(job(1, 4, "psp:c=1,b=0.75", "sgd:lr=1"), 1, how);
        (2..4).for_each(|shard| run.bench.world.hold(run.bench.shard_node(shard), run.bench.worker_node(0)));
        let ticket = run.iterate(0);
        assert!(!run.is_due(0, ticket));
        run.bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "psp:c=1,b=0.5")])));
        run.go_on(0, ticket);
    });
}

/// Under `ssp` a server answers with a version that is older than the iteration, and the worker hears of `psp` before the answer. It
/// is all that the worker asked for, and cannot be dropped like a block that it may go on without.
#[test]
fn a_copy_that_was_asked_for_before_a_switch_is_taken() {
    both(|how| {
        let mut run = Run::new(job(2, 1, "ssp:s=1", "sgd:lr=1"), 1, how);
        let (shard, worker) = (run.bench.shard_node(0), run.bench.worker_node(0));
        let ticket = run.iterate(0);
        run.go_on(0, ticket);
        let ticket = run.iterate(0);
        assert!(!run.is_due(0, ticket), "the other worker has not pushed");
        run.bench.world.hold(shard, worker);
        run.iterate(1);
        run.bench.set(PolicyOverride::new("*", Policies::of([(Axis::Sync, "psp:c=1,b=0.5")])));
        run.bench.world.release(shard, worker);
        run.bench.run();
        run.go_on(0, ticket);
    });
}

// Messages that would be dropped are not sent (PSP-SGD, section 2).

const WHOLE: u64 = ELEMENTS as u64 * 4;

#[test]
fn a_gradient_that_the_server_is_known_to_drop_is_not_sent() {
    both(|how| {
        let mut run = Run::new(job(3, 2, "psp:c=1", "sgd:lr=3"), 1, how);
        for _ in 0..3 {
            let ticket = run.iterate(0);
            run.go_on(0, ticket);
        }
        let pushed = |run: &Run| run.bench.worker(1).report().bytes_pushed;
        // It does not know yet how far the servers are.
        let ticket = run.iterate(1);
        run.go_on(1, ticket);
        assert_eq!(pushed(&run), WHOLE);
        for clock in 1..3 {
            let ticket = run.iterate(1);
            assert_eq!(run.go_on(1, ticket), run.parameters(), "clock {clock}");
        }
        assert_eq!(pushed(&run), WHOLE, "two more gradients were dropped here");
        let ticket = run.iterate(1);
        run.go_on(1, ticket);
        assert_eq!(pushed(&run), 2 * WHOLE, "now it is where the servers are");
        let report = run.bench.shard(0).report(run.bench.now()).unwrap();
        let stats = &report.tables[0].stats;
        assert_eq!((stats.pushes, stats.dropped), (4, 3), "each of them counts");
        assert_eq!(run.parameters()[0], -4.0);
    });
}

#[test]
fn an_answer_that_the_worker_would_drop_is_not_sent() {
    let bytes_pulled = |sync: &str, how: How| {
        let mut run = Run::new(job(2, 2, sync, "sgd:lr=2"), 1, how);
        let (shard, slow) = (run.bench.shard_node(1), run.bench.worker_node(1));
        run.bench.world.hold(slow, shard);
        let before = run.bench.worker(0).report().bytes_pulled;
        let mut tickets = Vec::new();
        for _ in 0..3 {
            let ticket = run.iterate(0);
            tickets.push(run.iterate(1));
            run.go_on(0, ticket);
            if how == How::Tables || run.is_due(1, tickets[tickets.len() - 1]) {
                run.go_on(1, tickets[tickets.len() - 1]);
            }
        }
        run.bench.thaw();
        assert_eq!(run.parameters()[LAST], INITIAL - 2.0 * 3.0, "no gradient was lost");
        let ticket = run.iterate(0);
        run.iterate(1);
        assert_eq!(run.go_on(0, ticket), run.parameters());
        run.bench.worker(0).report().bytes_pulled - before
    };
    both(|how| {
        // Of the first server four blocks, and of the second those of the last two iterations: its rounds closed one by one when the
        // other worker's gradients came, and the worker waited for the third one by then.
        assert_eq!(bytes_pulled("psp:c=2,b=0.5", how), (4 + 2) * WHOLE / 2, "{how:?}");
    });
}
