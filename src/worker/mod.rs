//! The worker's end: its rings, its region, the watchdog for its parent, and SIGTERM.

pub mod arrays;
pub mod kept;
pub mod port;
mod stack;
mod status;
pub mod stopwatch;
pub mod terminate;
pub mod watchdog;
