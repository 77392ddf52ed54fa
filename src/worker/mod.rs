//! The worker's side of the engine: its rings, its region, the watchdog that ends the worker after the main process has
//! ended, and the reaction to SIGTERM.

pub mod arrays;
pub mod kept;
pub mod port;
mod stack;
mod status;
pub mod stopwatch;
pub mod terminate;
pub mod watchdog;
