//! An engine whose workers' ports are in this process.

mod damage;
mod links;
mod pin;
mod queue;
mod restarts;
mod rig;
mod snapshots;
mod steps;
mod tied;
