//! What the networks on images share: the data, its scaling, the training step and the accuracy.

use super::{Evaluation, Factory, LayerFlow, Touched, Workload, WorkloadConfig, WorkloadInfo};
use crate::data::{DataError, Images, idx};
use crate::generate;
use crate::network::{Network, ProductGradient, Workspace, softmax_cross_entropy};
use crate::shard::{Sampler, Stream, pieces};
use paramill_core::table::TableSpec;
use std::sync::Arc;

/// Images in a forward pass of the evaluation.
const EVALUATION_BATCH: usize = 200;

/// Size of the images and number of classes: what a network must be built for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) classes: usize,
}

/// Loads the images for `info`, whose network `architecture` builds.
pub(super) fn load(
    info: &'static WorkloadInfo,
    config: &WorkloadConfig,
    architecture: fn(Shape, &WorkloadConfig) -> Result<Network, DataError>,
) -> Result<Factory, DataError> {
    let (mut train, test, classes) = match &config.data {
        Some(folder) => {
            let test_folder = config.test.as_ref().unwrap_or(folder);
            let (train, test) =
                (idx::read(folder, idx::Half::Train)?, idx::read(test_folder, idx::Half::Test)?);
            let classes = idx::classes((folder, &train), (test_folder, &test))?;
            (train, test, classes)
        }
        None => {
            let made = generate::images(config.seed, config.examples.unwrap_or(8_000));
            (made.train, made.test, made.prototypes.len())
        }
    };
    if (train.height, train.width) != (test.height, test.width) {
        let why = format!(
            "training images of {} x {} and test images of {} x {}: expected one size",
            train.height, train.width, test.height, test.width
        );
        return Err(DataError::Config { why });
    }
    if classes < 2 {
        let why = "all images have the label 0: expected at least two classes".into();
        return Err(DataError::Config { why });
    }
    let shape = Shape { height: train.height, width: train.width, classes };
    architecture(shape, config)?;
    train.truncate(config.examples.unwrap_or(usize::MAX));
    Sampler::check(train.len(), config.workers)?;

    let data = Arc::new(Data { scale: Scale::of(&train), train, test });
    let config = config.clone();
    Ok(Box::new(move |rank| {
        let network =
            architecture(shape, &config).expect("the same network was built when the data was loaded");
        Box::new(Classifier::new(info, network, data.clone(), &config, rank))
    }))
}

struct Data {
    train: Images,
    test: Images,
    scale: Scale,
}

/// What each byte becomes: the pixels of the training images get mean 0 and deviation 1.
struct Scale([f32; 256]);

impl Scale {
    fn of(images: &Images) -> Scale {
        let mut counts = [0u64; 256];
        images.pixels.iter().for_each(|&pixel| counts[usize::from(pixel)] += 1);
        let mean_of = |value: &dyn Fn(f64) -> f64| {
            let sum: f64 =
                counts.iter().enumerate().map(|(pixel, &count)| count as f64 * value(pixel as f64)).sum();
            sum / images.pixels.len() as f64
        };
        let mean = mean_of(&|pixel| pixel);
        // Images of one colour have no deviation.
        let deviation = mean_of(&|pixel| (pixel - mean).powi(2)).sqrt().max(1.0);
        Scale(std::array::from_fn(|pixel| ((pixel as f64 - mean) / deviation) as f32))
    }

    fn append(&self, image: &[u8], to: &mut Vec<f32>) {
        to.extend(image.iter().map(|&pixel| self.0[usize::from(pixel)]));
    }
}

struct Classifier {
    info: &'static WorkloadInfo,
    network: Network,
    data: Arc<Data>,
    sampler: Sampler,
    seed: u64,
    workspace: Workspace,
    /// The prepared batch, scaled.
    input: Vec<f32>,
    labels: Vec<u8>,
}

impl Classifier {
    fn new(
        info: &'static WorkloadInfo,
        network: Network,
        data: Arc<Data>,
        config: &WorkloadConfig,
        rank: u32,
    ) -> Classifier {
        let sampler = Sampler::new(data.train.len(), config.batch, config.seed, rank, config.workers);
        let workspace = network.workspace(sampler.batch_len());
        let (input, labels) = (Vec::new(), Vec::new());
        Classifier { info, network, data, sampler, seed: config.seed, workspace, input, labels }
    }
}

impl Workload for Classifier {
    fn name(&self) -> &'static str {
        self.info.name
    }

    fn tables(&self) -> Vec<TableSpec> {
        self.network.tables()
    }

    fn initial(&self, table: usize) -> Vec<f32> {
        self.network.initial(table, &mut Stream::Initial.prng(self.seed, table as u64))
    }

    fn multiplies(&self, table: usize) -> u64 {
        self.network.multiplies(table)
    }

    fn steps_per_epoch(&self) -> u64 {
        self.sampler.steps_per_epoch()
    }

    fn prepare(&mut self, step: u64) -> Vec<Touched> {
        let Data { train, scale, .. } = &*self.data;
        self.input.clear();
        self.labels.clear();
        for &example in self.sampler.batch(step) {
            scale.append(train.image(example as usize), &mut self.input);
            self.labels.push(train.labels[example as usize]);
        }
        vec![Touched::All; self.network.tables().len()]
    }

    fn step(&mut self, parameters: &[&[f32]], gradients: &mut [Vec<f32>]) -> f32 {
        assert!(!self.labels.is_empty(), "prepare comes before step");
        let (network, workspace) = (&self.network, &mut self.workspace);
        network.forward(parameters, &self.input, workspace);
        let (scores, slopes) = network.loss_slope(workspace);
        let loss = softmax_cross_entropy(scores, &self.labels, network.output_len(), slopes);
        network.backward(parameters, &self.input, workspace, gradients);
        loss
    }

    fn step_by_layers(&mut self, gradients: &mut [Vec<f32>], flow: &mut dyn LayerFlow) -> Option<f32> {
        assert!(!self.labels.is_empty(), "prepare comes before step");
        let (network, workspace) = (&self.network, &mut self.workspace);
        network.begin(&self.input, workspace);
        for layer in 0..network.layers() {
            let tables = network.tables_of(layer);
            if !flow.fetch(tables.clone()) {
                return None;
            }
            let parameters: Vec<&[f32]> = tables.map(|table| flow.values(table)).collect();
            network.forward_layer(layer, &parameters, &self.input, workspace);
        }
        let (scores, slopes) = network.loss_slope(workspace);
        let loss = softmax_cross_entropy(scores, &self.labels, network.output_len(), slopes);
        for layer in (0..network.layers()).rev() {
            let tables = network.tables_of(layer);
            let parameters: Vec<&[f32]> = tables.clone().map(|table| flow.values(table)).collect();
            let own = &mut gradients[tables.clone()];
            network.backward_layer(layer, &parameters, &self.input, workspace, own);
            for table in tables {
                let product = network.product(table, &self.input, workspace);
                if !flow.ready(table, &gradients[table], product) {
                    return None;
                }
            }
        }
        Some(loss)
    }

    fn product(&self, table: usize) -> Option<ProductGradient<'_>> {
        self.network.product(table, &self.input, &self.workspace)
    }

    fn evaluate(&self, parameters: &[&[f32]]) -> Evaluation {
        let Data { test, scale, .. } = &*self.data;
        let classes = self.network.output_len();
        let mut workspace = self.network.workspace(EVALUATION_BATCH);
        let mut input = Vec::new();
        let (mut loss, mut right) = (0.0, 0);
        for piece in pieces(test.len(), EVALUATION_BATCH) {
            input.clear();
            piece.clone().for_each(|example| scale.append(test.image(example), &mut input));
            let labels = &test.labels[piece];
            self.network.forward(parameters, &input, &mut workspace);
            let (scores, slopes) = self.network.loss_slope(&mut workspace);
            loss += f64::from(softmax_cross_entropy(scores, labels, classes, slopes)) * labels.len() as f64;
            right += scores.chunks(classes).zip(labels).filter(|(s, l)| best(s) == usize::from(**l)).count();
        }
        let count = test.len() as f64;
        Evaluation {
            loss: loss / count,
            metric: self.info.metric,
            value: right as f64 / count,
            extra: Vec::new(),
        }
    }
}

/// The class with the highest score; the first of equals.
fn best(scores: &[f32]) -> usize {
    scores.iter().enumerate().fold(0, |best, (class, score)| if *score > scores[best] { class } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_get_mean_0_and_deviation_1() {
        let images = Images { height: 1, width: 4, pixels: vec![0, 100, 200, 100], labels: vec![0] };
        let mut scaled = Vec::new();
        Scale::of(&images).append(images.image(0), &mut scaled);
        assert!(scaled.iter().sum::<f32>().abs() < 1e-6);
        assert!((scaled.iter().map(|x| x * x).sum::<f32>() / 4.0 - 1.0).abs() < 1e-6);
        let black = Images { height: 1, width: 1, pixels: vec![0], labels: vec![0] };
        assert_eq!(Scale::of(&black).0[0], 0.0);
    }

    #[test]
    fn the_best_class_is_the_first_of_equals() {
        assert_eq!((best(&[1.0, 3.0, 3.0]), best(&[-1.0, -2.0])), (1, 0));
    }
}
