//! Real driver.
