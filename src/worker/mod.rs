//! The worker's end of the engine: its rings, its region, the watchdog that ends it after the main process has ended,
//! and its reaction to SIGTERM.

pub mod arrays;
pub mod kept;
pub mod port;
mod stack;
mod status;
pub mod stopwatch;
pub mod terminate;
pub mod watchdog;
