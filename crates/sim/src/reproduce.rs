//! Published results, set up again: the paper's figures beside ours.

pub mod mps_placement;
