//! Vectorised loops over slices, each with a scalar twin.
