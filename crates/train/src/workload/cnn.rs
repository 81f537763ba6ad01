//! A small convolutional network on images.

use super::images::{self, Shape};
use super::{WorkloadConfig, WorkloadInfo};
use crate::data::DataError;
use crate::network::{Conv3x3, Dense, Layer, MaxPool2, Network, Relu};

pub(super) static INFO: WorkloadInfo = WorkloadInfo {
    name: "cnn",
    summary: "Image classifier with two convolutions; every weight and bias is a dense table.",
    data: "a folder with the four idx files of MNIST or its kin, plain or gzip",
    optimizer: "adam:lr=0.001",
    epochs: 2,
    batch: 32,
    metric: "accuracy",
    load: |config| images::load(&INFO, config, network),
};

const FILTERS: [usize; 2] = [16, 32];
/// The smallest side of which two convolutions and two poolings leave something.
const MIN_SIDE: usize = 10;

fn network(shape: Shape, config: &WorkloadConfig) -> Result<Network, DataError> {
    let Shape { height, width, classes } = shape;
    if height.min(width) < MIN_SIDE {
        let why =
            format!("images of {height} x {width}: cnn needs {MIN_SIDE} x {MIN_SIDE}; mlp takes any size");
        return Err(DataError::Config { why });
    }
    // The maximum is taken before the rectifier: the order does not matter, and a quarter of the values is left.
    let conv1 = Conv3x3 { channels: 1, height, width, filters: FILTERS[0] };
    let pool1 = pool_after(conv1);
    let (height, width) = (pool1.output_height(), pool1.output_width());
    let conv2 = Conv3x3 { channels: FILTERS[0], height, width, filters: FILTERS[1] };
    let pool2 = pool_after(conv2);
    let hidden = config.hidden;
    Ok(Network::new("conv1", conv1)
        .then("pool1", pool1)
        .then("relu1", Relu { len: pool1.output_len() })
        .then("conv2", conv2)
        .then("pool2", pool2)
        .then("relu2", Relu { len: pool2.output_len() })
        .then("fc1", Dense { inputs: pool2.output_len(), outputs: hidden })
        .then("relu3", Relu { len: hidden })
        .then("fc2", Dense { inputs: hidden, outputs: classes }))
}

fn pool_after(conv: Conv3x3) -> MaxPool2 {
    MaxPool2 { channels: conv.filters, height: conv.output_height(), width: conv.output_width() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn most_of_the_work_is_in_a_convolution_and_most_of_the_parameters_are_not() {
        let workload = crate::build(&crate::WorkloadConfig::new("cnn").unwrap()).unwrap();
        let tables = workload.tables();
        let of = |name: &str| {
            let table = tables.iter().position(|table| *table.name == *name).unwrap();
            (tables[table].elements(), workload.multiplies(table))
        };
        // 16 filters of 3 x 3 at 26 x 26 places; 32 of 16 x 3 x 3 at 11 x 11.
        assert_eq!(of("conv1.weight"), (144, 144 * 26 * 26));
        assert_eq!(of("conv2.weight"), (4608, 4608 * 11 * 11));
        assert_eq!(of("fc1.weight"), (102_400, 102_400));
        assert_eq!(of("fc1.bias").1, 0);
    }
}
