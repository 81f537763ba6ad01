#![no_main]

paramill_fuzz::target!("packed");
