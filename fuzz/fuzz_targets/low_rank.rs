#![no_main]

paramill_fuzz::target!("low_rank");
