//! The worker's end: its rings, its region, the watch over its parent, and SIGTERM.

pub mod port;
mod stack;
mod status;
pub mod terminate;
pub mod watchdog;
