//! Optimizers whose steps depend on norms: they are those of a layer, however the job is cut and packed.

use super::bench::Bench;
use paramill_core::coordinator::JobConfig;
use paramill_core::policy::{Axis, Policies, Policy, PolicyOverride};
use paramill_core::table::{Layer, TableSpec};
use paramill_core::types::TableId;
use paramill_core::worker::Gradient;

const STEPS: usize = 10;
const WORKERS: usize = 2;
const LAYERS: [(&str, &[u64]); 5] =
    [("conv", &[40, 30]), ("conv.bias", &[40]), ("fc", &[30, 100]), ("fc.bias", &[7]), ("scale", &[])];
/// Packs may begin every layer at a cache line.
const ALIGNMENT: usize = 16;

fn elements(layer: usize) -> usize {
    LAYERS[layer].1.iter().product::<u64>() as usize
}

/// Layers differ in the length of their weights and gradients, so that one of another layer's norms would show.
fn weights(layer: usize) -> Vec<f32> {
    (0..elements(layer)).map(|at| (layer + 1) as f32 * ((at * 7 % 13) as f32 - 5.5) * 0.1).collect()
}

fn gradient(layer: usize, worker: usize, step: usize) -> Vec<f32> {
    let length = [0.3, 20.0, 0.01, 5.0, 1.0][layer];
    let value = |at: usize| length * ((at * 11 + 3 * worker + 5 * step) % 17) as f32 / 17.0 - 0.3 * length;
    (0..elements(layer)).map(value).collect()
}

/// Where the layers begin in a table that has all of them, and its length.
fn places() -> (Vec<usize>, usize) {
    let mut end = 0;
    let place = |layer| {
        let start = end;
        end += elements(layer).next_multiple_of(ALIGNMENT);
        start
    };
    ((0..LAYERS.len()).map(place).collect(), end)
}

fn together(of: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let (starts, end) = places();
    let mut values = vec![0.0; end];
    for (layer, start) in starts.into_iter().enumerate() {
        values[start..start + elements(layer)].copy_from_slice(&of(layer));
    }
    values
}

fn tables(packed: bool) -> Vec<(TableSpec, Vec<f32>)> {
    if !packed {
        let table = |layer: usize| (TableSpec::dense(LAYERS[layer].0, LAYERS[layer].1), weights(layer));
        return (0..LAYERS.len()).map(table).collect();
    }
    let (starts, end) = places();
    let layer = |(&(name, shape), start): (&(&str, &[u64]), usize)| Layer {
        name: name.into(),
        start: start as u64,
        shape: shape.to_vec(),
    };
    let layers = LAYERS.iter().zip(starts).map(layer).collect();
    vec![(TableSpec { layers, ..TableSpec::dense("all", [end as u64]) }, together(weights))]
}

/// A job, and how it is cut and packed.
#[derive(Debug, Clone, Copy)]
struct Shape {
    servers: u32,
    cores: u32,
    placement: &'static str,
    packed: bool,
}

fn config(optimizer: &str, sync: &str, shape: Shape) -> JobConfig {
    let policy = Policy::default()
        .with(Axis::Sync, sync)
        .with(Axis::Optimizer, optimizer)
        .with(Axis::Placement, shape.placement)
        .with(Axis::Order, "ranked")
        .with(Axis::Chunk, "256B");
    JobConfig { policy, ..JobConfig::new("test", WORKERS as u32, shape.servers) }
}

/// The parameters of each layer after [`STEPS`] steps.
fn train(optimizer: &str, sync: &str, shape: Shape) -> Vec<Vec<f32>> {
    let mut bench = Bench::new(config(optimizer, sync, shape), shape.cores);
    bench.start(&tables(shape.packed));
    for step in 0..STEPS {
        for worker in 0..WORKERS {
            let gradients: Vec<Vec<f32>> = match shape.packed {
                true => vec![together(|layer| gradient(layer, worker, step))],
                false => (0..LAYERS.len()).map(|layer| gradient(layer, worker, step)).collect(),
            };
            let now = bench.now();
            for (table, gradient) in (0..).map(TableId).zip(&gradients) {
                let pushed = bench.worker_mut(worker).push(now, table, Gradient::Dense(gradient), true);
                pushed.expect("it fits");
            }
            bench.worker_mut(worker).clock();
            bench.run();
        }
    }
    if !shape.packed {
        return (0..LAYERS.len())
            .map(|layer| bench.parameters(TableId(layer as u32), elements(layer)))
            .collect();
    }
    let (starts, end) = places();
    let all = bench.parameters(TableId(0), end);
    (0..LAYERS.len()).map(|layer| all[starts[layer]..starts[layer] + elements(layer)].to_vec()).collect()
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32, what: &str) {
    for (layer, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (found - expected).abs() / expected.abs().max(1e-3 * largest);
            assert!(error <= tolerance, "{what}: {}[{at}] is {found}, not {expected}", LAYERS[layer].0);
        }
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// LARS as the paper has it, with the momentum of this program, in double precision.
fn lars(lr: f64, weight_decay: f64, trust: f64) -> Vec<Vec<f32>> {
    let layer = |layer| {
        let mut w: Vec<f64> = weights(layer).into_iter().map(f64::from).collect();
        let mut velocity = vec![0.0; w.len()];
        for step in 0..STEPS {
            let of = |worker| gradient(layer, worker, step).into_iter().map(f64::from);
            let g: Vec<f64> = of(0).zip(of(1)).map(|(one, other)| (one + other) / 2.0).collect();
            let local = lr * trust * norm(&w) / (norm(&g) + weight_decay * norm(&w));
            for ((w, v), g) in w.iter_mut().zip(&mut velocity).zip(g) {
                *v = 0.9 * *v + local * (g + weight_decay * *w);
                *w -= *v;
            }
        }
        w.into_iter().map(|value| value as f32).collect()
    };
    (0..LAYERS.len()).map(layer).collect()
}

const PLAIN: Shape = Shape { servers: 1, cores: 1, placement: "heuristic", packed: false };

fn shapes() -> impl Iterator<Item = Shape> {
    let places = [(1, 1), (1, 3), (4, 1), (4, 2)];
    let placements = ["heuristic", "uniform"];
    let all = places.into_iter().flat_map(move |place| placements.map(|placement| (place, placement)));
    all.flat_map(|((servers, cores), placement)| {
        [false, true].map(|packed| Shape { servers, cores, placement, packed })
    })
}

#[test]
fn lars_is_the_same_on_one_server_and_on_four_packed_and_unpacked() {
    let optimizer = "lars:lr=1,weight_decay=0.01,trust=0.02";
    let expected = train(optimizer, "bsp", PLAIN);
    assert_close(&expected, &lars(1.0, 0.01, 0.02), 1e-4, "the formula");
    for shape in shapes() {
        assert_close(&train(optimizer, "bsp", shape), &expected, 1e-6, &format!("{shape:?}"));
    }
}

#[test]
fn gradients_are_clipped_by_layer_wherever_it_is() {
    // One bound, which some layers' gradients are beyond.
    for (optimizer, sync) in [("sgd:lr=0.1,clip=2", "bsp"), ("adam:lr=0.01,clip=2", "asp")] {
        let expected = train(optimizer, sync, PLAIN);
        for shape in shapes() {
            assert_close(&train(optimizer, sync, shape), &expected, 1e-6, &format!("{optimizer} {shape:?}"));
        }
    }
    let clipped = train("sgd:lr=0.1,clip=2", "bsp", PLAIN);
    let free = train("sgd:lr=0.1", "bsp", PLAIN);
    let is_clipped: Vec<bool> = clipped.iter().zip(&free).map(|(clipped, free)| clipped != free).collect();
    assert_eq!(is_clipped, [true, true, false, true, false]);
}

/// Padding has no norms, and no layer's gradient reaches another layer's parameters.
#[test]
fn padding_between_layers_stays_as_it_is() {
    let shape = Shape { packed: true, ..PLAIN };
    let mut bench = Bench::new(config("lars:lr=1,trust=0.1", "bsp", shape), 1);
    bench.start(&tables(true));
    let (starts, end) = places();
    for worker in 0..WORKERS {
        let now = bench.now();
        bench.worker_mut(worker).push(now, TableId(0), Gradient::Dense(&vec![1.0; end]), true).unwrap();
        bench.run();
    }
    let (before, after) = (together(weights), bench.parameters(TableId(0), end));
    for at in 0..end {
        let is_in = |layer: usize| (starts[layer]..starts[layer] + elements(layer)).contains(&at);
        let is_padding = !(0..LAYERS.len()).any(is_in);
        assert_eq!(is_padding, before[at] == after[at], "element {at}");
    }
}

#[test]
fn a_policy_names_all_layers_of_a_table_or_none() {
    let shape = Shape { packed: true, ..PLAIN };
    let mut bench = Bench::new(config("sgd:lr=0.1", "bsp", shape), 1);
    bench.start(&tables(true));
    let mut set = |table: &str| {
        bench.set(PolicyOverride::new(table, Policies::of([(Axis::Sync, "asp")])));
        bench.shard(0).report(bench.now()).expect("it has joined").tables[0].sync.clone()
    };
    assert_eq!(set("*.bias"), "bsp", "some of them");
    assert_eq!(set("all"), "bsp", "the pack's own name is no layer's");
    // The pack's name does not match, and its layers do.
    assert_eq!(set("*c*"), "asp");
}
