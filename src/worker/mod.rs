//! The worker's end: its rings, its region, and the watch over its parent.

pub mod port;
pub mod watchdog;
