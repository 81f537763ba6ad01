//! The tensors of real models, in the order in which a framework creates them.

use serde::Deserialize;

/// What is known about a model: enough to place it and to say how much it computes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Model {
    /// Its name here.
    pub name: String,
    /// Which implementation the shapes follow.
    pub source: String,
    /// What one sample is: an image of a certain size, a token.
    pub macs_per: String,
    /// Its trainable tensors, in definition order.
    pub tensors: Vec<Tensor>,
}

/// One trainable tensor.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Tensor {
    /// Its name in the model.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Multiply-accumulates of a forward pass that use it, per sample.
    pub macs: u64,
}

impl Model {
    /// Number of parameters.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(Tensor::elements).sum()
    }

    /// Multiply-accumulates of a forward pass per sample.
    pub fn macs(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.macs).sum()
    }
}

impl Tensor {
    /// Number of parameters.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// No model of this name is shipped.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("unknown model `{name}`; known: {known}")]
pub struct UnknownModel {
    /// What was given.
    pub name: String,
    /// The names that exist.
    pub known: String,
}

/// The model of this name.
pub fn model(name: &str) -> Result<Model, UnknownModel> {
    match FILES.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => Ok(serde_json::from_str(text).expect("the shipped layer lists are well-formed")),
        None => Err(UnknownModel { name: name.to_owned(), known: names().collect::<Vec<_>>().join(", ") }),
    }
}

/// The names of all models.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

const FILES: &[(&str, &str)] = &[
    ("alexnet", include_str!("../models/alexnet.json")),
    ("googlenet", include_str!("../models/googlenet.json")),
    ("gpt2_small", include_str!("../models/gpt2_small.json")),
    ("inception_v4", include_str!("../models/inception_v4.json")),
    ("resnet110_cifar", include_str!("../models/resnet110_cifar.json")),
    ("resnet20_cifar", include_str!("../models/resnet20_cifar.json")),
    ("resnet50", include_str!("../models/resnet50.json")),
    ("resnet56_cifar", include_str!("../models/resnet56_cifar.json")),
    ("vgg19", include_str!("../models/vgg19.json")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Totals {
        params: u64,
        n_tensors: usize,
        macs: u64,
    }

    #[test]
    fn every_list_adds_up_to_its_published_totals() {
        for (name, text) in FILES {
            let (model, totals) = (model(name).unwrap(), serde_json::from_str::<Totals>(text).unwrap());
            assert_eq!(model.name, *name);
            assert_eq!(model.elements(), totals.params, "{name}");
            assert_eq!(model.tensors.len(), totals.n_tensors, "{name}");
            assert_eq!(model.macs(), totals.macs, "{name}");
            assert!(model.tensors.iter().all(|tensor| tensor.elements() > 0), "{name}");
        }
    }

    #[test]
    fn an_unknown_model_is_answered_with_the_known_ones() {
        let error = model("resnet9000").unwrap_err().to_string();
        assert!(error.starts_with("unknown model `resnet9000`; known: alexnet, googlenet,"), "{error}");
    }
}
