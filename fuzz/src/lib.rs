//! Fuzz targets of Paramill's decoders. What they check is in `crates/core/tests/decoders/families.rs`, which the seeded
//! loops of `cargo test` call too.

#[path = "../../crates/core/tests/decoders/families.rs"]
pub mod families;

pub use libfuzzer_sys;

/// A target that hands its inputs to one family of decoders.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        thread_local! {
            static FAMILY: std::cell::RefCell<Box<dyn $crate::families::Family>> =
                std::cell::RefCell::new($crate::families::family($name));
        }

        $crate::libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            FAMILY.with_borrow_mut(|family| _ = family.check(input));
        });
    };
}
