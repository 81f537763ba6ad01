//! Feed-forward networks on plain slices: every weight and bias is a table of its own.
//!
//! A [`Network`] only describes; what changes in a pass lives in a [`Workspace`] that is reused, so that a step
//! allocates nothing. Examples lie one after the other; an example is channels, then rows, then columns.

mod activation;
mod conv;
mod dense;
mod gemm;
mod pool;

pub use activation::{Relu, softmax_cross_entropy};
pub use conv::Conv3x3;
pub use dense::Dense;
pub use pool::MaxPool2;

use paramill_core::prng::Prng;
use paramill_core::table::TableSpec;
use std::fmt;
use std::ops::Range;

/// A differentiable function of an example. Four methods are required, and `parameters` where there are any.
///
/// A layer MUST treat the examples of a batch independently, MUST overwrite (not add to) everything it is to write,
/// and MUST have all its gradients complete when `backward` returns.
pub trait Layer: Send + Sync + fmt::Debug {
    /// Values in an example.
    fn input_len(&self) -> usize;

    /// Values in the result for an example.
    fn output_len(&self) -> usize;

    /// What is trained: a table each, in the order of every `parameters` and `gradients`.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Whether the gradient of one of [`Layer::parameters`] is a product of two matrices: the slopes along the outputs, and the
    /// inputs, of every example of the batch.
    fn is_product(&self, _parameter: usize) -> bool {
        false
    }

    /// Values of temporary storage that a pass over a batch needs.
    fn scratch_len(&self) -> usize {
        0
    }

    /// Computes `output` for every example of `input`.
    fn forward(&self, parameters: &[&[f32]], input: &[f32], output: &mut [f32], scratch: &mut [f32]);

    /// Computes the gradients from that of the output.
    fn backward(&self, pass: Backward<'_>);
}

/// A trained array of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name in the layer.
    pub name: &'static str,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Standard deviation of the initial values; 0 for zeros.
    pub deviation: f64,
}

impl Parameter {
    /// A weight whose outputs have the scale of its `fan_in` inputs, so that no layer begins saturated or dead.
    fn weight(shape: Vec<u64>, fan_in: usize) -> Parameter {
        Parameter { name: "weight", shape, deviation: (1.0 / fan_in as f64).sqrt() }
    }

    fn bias(len: usize) -> Parameter {
        Parameter { name: "bias", shape: vec![len as u64], deviation: 0.0 }
    }
}

/// A gradient as a product `u v`.
#[derive(Debug, Clone, PartialEq)]
pub struct ProductGradient<'a> {
    /// Examples in the batch: columns of `u`, rows of `v`.
    pub rank: usize,
    /// A row for every row of the parameter.
    pub u: Vec<f32>,
    /// A row for every example.
    pub v: &'a [f32],
}

/// What a layer's backward pass reads and writes. Slices over a batch hold one example after the other.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The layer's parameters.
    pub parameters: &'a [&'a [f32]],
    /// What the forward pass read.
    pub input: &'a [f32],
    /// What the forward pass wrote.
    pub output: &'a [f32],
    /// Slope of the loss along every output value.
    pub output_gradient: &'a [f32],
    /// To write: the slope along every parameter, summed over the batch. Already of the parameters' lengths.
    pub gradients: &'a mut [Vec<f32>],
    /// To write: the slope along every input value; the first layer has nobody to pass it to.
    pub input_gradient: Option<&'a mut [f32]>,
    /// Temporary storage of [`Layer::scratch_len`].
    pub scratch: &'a mut [f32],
}

/// Layers one after the other; at least one.
#[derive(Debug)]
pub struct Network {
    layers: Vec<Named>,
}

#[derive(Debug)]
struct Named {
    name: &'static str,
    layer: Box<dyn Layer>,
    /// Number of its first table.
    first_table: usize,
    tables: usize,
}

impl Network {
    /// A network of one layer; its tables are called `name.weight` and so on.
    pub fn new(name: &'static str, layer: impl Layer + 'static) -> Network {
        Network { layers: Vec::new() }.then(name, layer)
    }

    /// The same network with one more layer at its end.
    ///
    /// # Panics
    /// When the layer does not take what the one before it gives.
    pub fn then(mut self, name: &'static str, layer: impl Layer + 'static) -> Network {
        let first_table = self.layers.last().map_or(0, |last| {
            assert_eq!(last.layer.output_len(), layer.input_len(), "{name} fits the layer before it");
            last.first_table + last.tables
        });
        let tables = layer.parameters().len();
        self.layers.push(Named { name, layer: Box::new(layer), first_table, tables });
        self
    }

    /// The tables of all layers, front to back.
    pub fn tables(&self) -> Vec<TableSpec> {
        self.parameters()
            .map(|(layer, parameter)| {
                TableSpec::dense(format!("{layer}.{}", parameter.name), parameter.shape)
            })
            .collect()
    }

    /// Initial values of a table, drawn from `prng`.
    pub fn initial(&self, table: usize, prng: &mut Prng) -> Vec<f32> {
        let (_, parameter) = self.parameters().nth(table).expect("a table of this network");
        let len = parameter.shape.iter().product::<u64>() as usize;
        match parameter.deviation {
            0.0 => vec![0.0; len],
            deviation => (0..len).map(|_| (deviation * prng.normal()) as f32).collect(),
        }
    }

    /// Multiply-accumulates with the values of a table in the forward pass of an example: every output of a layer has one with
    /// each value of its weights' row. None with biases, which are added.
    pub fn multiplies(&self, table: usize) -> u64 {
        let named = self
            .layers
            .iter()
            .find(|named| (named.first_table..named.first_table + named.tables).contains(&table));
        let named = named.expect("a table of this network");
        let parameter = &named.layer.parameters()[table - named.first_table];
        match parameter.shape[..] {
            [_, ref fan_in @ ..] if !fan_in.is_empty() => {
                named.layer.output_len() as u64 * fan_in.iter().product::<u64>()
            }
            _ => 0,
        }
    }

    /// Values in an example.
    pub fn input_len(&self) -> usize {
        self.layers[0].layer.input_len()
    }

    /// Values in the result for an example.
    pub fn output_len(&self) -> usize {
        self.layers[self.layers.len() - 1].layer.output_len()
    }

    /// Storage for batches of up to `batch` examples.
    pub fn workspace(&self, batch: usize) -> Workspace {
        let scratch = self.layers.iter().map(|named| named.layer.scratch_len()).max().unwrap_or(0);
        let per_layer = || {
            self.layers.iter().map(|named| vec![0.0; batch * named.layer.output_len()]).collect::<Vec<_>>()
        };
        Workspace { outputs: per_layer(), gradients: per_layer(), scratch: vec![0.0; scratch], batch: 0 }
    }

    /// Computes the output of every example in `input`.
    ///
    /// # Panics
    /// When the workspace is too small for the examples.
    pub fn forward<'w>(
        &self,
        parameters: &[&[f32]],
        input: &[f32],
        workspace: &'w mut Workspace,
    ) -> &'w [f32] {
        self.begin(input, workspace);
        for layer in 0..self.layers.len() {
            self.forward_layer(layer, self.layers[layer].of(parameters), input, workspace);
        }
        &workspace.outputs[self.layers.len() - 1][..workspace.batch * self.output_len()]
    }

    /// Number of layers.
    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The tables of a layer.
    pub(crate) fn tables_of(&self, layer: usize) -> Range<usize> {
        let Named { first_table, tables, .. } = self.layers[layer];
        first_table..first_table + tables
    }

    /// Begins a forward pass that goes layer by layer.
    pub(crate) fn begin(&self, input: &[f32], workspace: &mut Workspace) {
        workspace.batch = input.len() / self.input_len();
    }

    /// One layer of a forward pass, with the parameters of this layer. `input` is that of the network.
    pub(crate) fn forward_layer(
        &self,
        index: usize,
        parameters: &[&[f32]],
        input: &[f32],
        workspace: &mut Workspace,
    ) {
        let (layer, batch) = (&self.layers[index].layer, workspace.batch);
        let (before, rest) = workspace.outputs.split_at_mut(index);
        let input = match before.last() {
            Some(output) => &output[..batch * layer.input_len()],
            None => input,
        };
        let output = &mut rest[0][..batch * layer.output_len()];
        layer.forward(parameters, input, output, &mut workspace.scratch);
    }

    /// The output of the last forward pass, and the slope of the loss along it, to be filled for the backward pass.
    pub fn loss_slope<'w>(&self, workspace: &'w mut Workspace) -> (&'w [f32], &'w mut [f32]) {
        let (last, len) = (self.layers.len() - 1, workspace.batch * self.output_len());
        (&workspace.outputs[last][..len], &mut workspace.gradients[last][..len])
    }

    /// Computes all gradients, back to front, after [`Network::forward`] and once [`Network::loss_slope`] is
    /// filled. A layer's gradients are complete when its turn is over.
    pub fn backward(
        &self,
        parameters: &[&[f32]],
        input: &[f32],
        workspace: &mut Workspace,
        gradients: &mut [Vec<f32>],
    ) {
        for layer in (0..self.layers.len()).rev() {
            let gradients = &mut gradients[self.tables_of(layer)];
            self.backward_layer(layer, self.layers[layer].of(parameters), input, workspace, gradients);
        }
    }

    /// One layer of a backward pass, with the parameters and gradients of this layer.
    pub(crate) fn backward_layer(
        &self,
        index: usize,
        parameters: &[&[f32]],
        input: &[f32],
        workspace: &mut Workspace,
        gradients: &mut [Vec<f32>],
    ) {
        let Workspace { outputs, gradients: slopes, scratch, batch } = workspace;
        let layer = &self.layers[index].layer;
        let (slopes_before, slopes_here) = slopes.split_at_mut(index);
        let (input_len, output_len) = (*batch * layer.input_len(), *batch * layer.output_len());
        for (gradient, parameter) in gradients.iter_mut().zip(parameters) {
            gradient.resize(parameter.len(), 0.0);
        }
        layer.backward(Backward {
            parameters,
            input: if index == 0 { input } else { &outputs[index - 1][..input_len] },
            output: &outputs[index][..output_len],
            output_gradient: &slopes_here[0][..output_len],
            gradients,
            input_gradient: slopes_before.last_mut().map(|slope| &mut slope[..input_len]),
            scratch,
        });
    }

    /// The gradient of a table after [`Network::backward`] as a product, if its layer makes it as one. `input` is that of the
    /// pass.
    pub fn product<'a>(
        &self,
        table: usize,
        input: &'a [f32],
        workspace: &'a Workspace,
    ) -> Option<ProductGradient<'a>> {
        let index = self.layers.iter().rposition(|named| named.first_table <= table)?;
        let Named { layer, first_table, .. } = &self.layers[index];
        if !layer.is_product(table - first_table) {
            return None;
        }
        let (rank, outputs) = (workspace.batch, layer.output_len());
        let slopes = &workspace.gradients[index][..rank * outputs];
        let u = (0..outputs).flat_map(|row| slopes.iter().skip(row).step_by(outputs)).copied().collect();
        let v = if index == 0 { input } else { &workspace.outputs[index - 1][..rank * layer.input_len()] };
        Some(ProductGradient { rank, u, v })
    }

    fn parameters(&self) -> impl Iterator<Item = (&'static str, Parameter)> {
        self.layers
            .iter()
            .flat_map(|named| named.layer.parameters().into_iter().map(|parameter| (named.name, parameter)))
    }
}

impl Named {
    fn of<'a, 'b>(&self, parameters: &'a [&'b [f32]]) -> &'a [&'b [f32]] {
        &parameters[self.first_table..self.first_table + self.tables]
    }
}

/// What a pass through a [`Network`] writes on its way.
#[derive(Debug)]
pub struct Workspace {
    /// Of each layer.
    outputs: Vec<Vec<f32>>,
    /// Slopes of the loss along each layer's outputs.
    gradients: Vec<Vec<f32>>,
    scratch: Vec<f32>,
    /// Examples in the last forward pass.
    batch: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fully_connected_layer_has_its_gradient_as_a_product_too() {
        let network = Network::new("fc1", Dense { inputs: 5, outputs: 4 })
            .then("relu1", Relu { len: 4 })
            .then("fc2", Dense { inputs: 4, outputs: 3 });
        let tables: Vec<Vec<f32>> =
            (0..network.tables().len()).map(|table| network.initial(table, &mut Prng::new(7))).collect();
        let parameters = gradient_check::slices(&tables);
        let input: Vec<f32> = (0..30).map(|at| (at as f32 * 0.7).sin()).collect();
        let (mut workspace, mut gradients) = (network.workspace(6), vec![Vec::new(); tables.len()]);
        network.forward(&parameters, &input, &mut workspace);
        let (scores, slopes) = network.loss_slope(&mut workspace);
        softmax_cross_entropy(scores, &[0, 1, 2, 0, 1, 2], 3, slopes);
        network.backward(&parameters, &input, &mut workspace, &mut gradients);
        for (table, (rows, columns)) in [(0, (4, 5)), (2, (3, 4))] {
            let ProductGradient { rank, u, v } = network.product(table, &input, &workspace).unwrap();
            assert_eq!((rank, u.len(), v.len()), (6, 6 * rows, 6 * columns));
            for (at, gradient) in gradients[table].iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let product: f32 = (0..rank).map(|k| u[row * rank + k] * v[k * columns + column]).sum();
                assert!((product - gradient).abs() < 1e-6, "table {table}, element {at}");
            }
        }
        assert_eq!([1, 3].map(|table| network.product(table, &input, &workspace)), [None, None]);
    }
}

#[cfg(test)]
pub(crate) mod gradient_check {
    use super::*;

    /// Compares a layer's gradients with differences of the loss `sum(slope * output)` for a random slope.
    pub(crate) fn check(layer: &dyn Layer, input: &[f32]) {
        let mut prng = Prng::new(11);
        let mut random = |len: usize| -> Vec<f32> { (0..len).map(|_| prng.normal() as f32).collect() };
        let output_len = input.len() / layer.input_len() * layer.output_len();
        let slope = random(output_len);
        let mut tables: Vec<Vec<f32>> =
            layer.parameters().iter().map(|p| random(p.shape.iter().product::<u64>() as usize)).collect();
        let mut input = input.to_vec();
        let mut scratch = vec![f32::NAN; layer.scratch_len()];
        let mut output = vec![f32::NAN; output_len];

        layer.forward(&slices(&tables), &input, &mut output, &mut scratch);
        // Whatever is there before must be overwritten.
        let mut gradients: Vec<Vec<f32>> = tables.iter().map(|table| vec![f32::NAN; table.len()]).collect();
        let mut input_gradient = vec![f32::NAN; input.len()];
        layer.backward(Backward {
            parameters: &slices(&tables),
            input: &input,
            output: &output,
            output_gradient: &slope,
            gradients: &mut gradients,
            input_gradient: Some(&mut input_gradient),
            scratch: &mut scratch,
        });

        let mut loss = |tables: &[Vec<f32>], input: &[f32]| -> f64 {
            layer.forward(&slices(tables), input, &mut output, &mut scratch);
            output.iter().zip(&slope).map(|(o, s)| f64::from(*o) * f64::from(*s)).sum()
        };
        const STEP: f32 = 1e-2;
        let agree = |computed: f32, above: f64, below: f64, what: &str| {
            let difference = (above - below) / (2.0 * f64::from(STEP));
            let error = (f64::from(computed) - difference).abs();
            assert!(error < 2e-3 * (1.0 + difference.abs()), "{layer:?} {what}: {computed}, {difference}");
        };
        for i in 0..input.len() {
            let kept = input[i];
            input[i] = kept + STEP;
            let above = loss(&tables, &input);
            input[i] = kept - STEP;
            let below = loss(&tables, &input);
            input[i] = kept;
            agree(input_gradient[i], above, below, &format!("input {i}"));
        }
        for table in 0..tables.len() {
            for i in 0..tables[table].len() {
                let kept = tables[table][i];
                tables[table][i] = kept + STEP;
                let above = loss(&tables, &input);
                tables[table][i] = kept - STEP;
                let below = loss(&tables, &input);
                tables[table][i] = kept;
                agree(gradients[table][i], above, below, &format!("table {table}, element {i}"));
            }
        }
    }

    pub(crate) fn slices(tables: &[Vec<f32>]) -> Vec<&[f32]> {
        tables.iter().map(Vec::as_slice).collect()
    }
}
