//! A network with one hidden layer on images.

use super::images::{self, Shape};
use super::{WorkloadConfig, WorkloadInfo};
use crate::data::DataError;
use crate::network::{Dense, Network, Relu};

pub(super) static INFO: WorkloadInfo = WorkloadInfo {
    name: "mlp",
    summary: "Image classifier with one hidden layer; every weight and bias is a dense table.",
    data: "a folder with the four idx files of MNIST or its kin, plain or gzip",
    optimizer: "adam:lr=0.001",
    epochs: 5,
    batch: 32,
    metric: "accuracy",
    load: |config| images::load(&INFO, config, network),
};

fn network(shape: Shape, config: &WorkloadConfig) -> Result<Network, DataError> {
    let (inputs, hidden) = (shape.height * shape.width, config.hidden);
    Ok(Network::new("fc1", Dense { inputs, outputs: hidden })
        .then("relu1", Relu { len: hidden })
        .then("fc2", Dense { inputs: hidden, outputs: shape.classes }))
}
