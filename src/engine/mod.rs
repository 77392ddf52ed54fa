//! The engine, which performs the scheduler's actions and reports events to it.
//!
//! Without pinning, the engine has no thread in the main process, apart from those of the links to other machines:
//! `next` drains the completion rings, and waits for the doorbell and the workers' pidfds in one system call. With
//! pinning, a thread owns the consumer's ends of the rings ([`completions::Completions`]) and passes prepared batches
//! to `next` (`pin.rs`).
//!
//! [`Engine`] (`core.rs`) delegates to its parts, each of which has a separate file: [`delivery`], the state of `next`;
//! `outbox`, messages to the workers; `inbox`, arrivals from the workers; `liveness`, stuck and dead workers; `times`,
//! the clock and the main process's status page. `intake`, `wait`, `stall_checks`, `deaths`, `early`, `restart`,
//! `first_snapshots`, `statistics` and `shutdown` contain further `impl Engine` blocks, which move events between the
//! parts. A file uses only files of lower layers (`tests/layers.rs` checks this). From the top, the layers are the
//! files with these blocks, the core, the parts, [`Handle`], and the types.

mod answers;
pub mod completions;
mod core;
mod deaths;
pub mod delivery;
mod early;
mod first_snapshots;
pub mod gate;
pub mod handle;
mod inbox;
mod intake;
mod links;
mod liveness;
mod outbox;
mod page;
pub mod pin;
mod pin_control;
pub mod position;
mod process;
mod queue;
mod restart;
mod shutdown;
pub mod snapshots;
mod stall_checks;
pub mod stalls;
mod statistics;
mod status;
mod times;
mod types;
mod wait;
mod watch;

pub use self::answers::{Answers, Snapshot};
pub use self::completions::Incoming;
pub use self::core::Engine;
pub use self::handle::Handle;
pub use self::shutdown::Ending;
pub use self::status::Status;
pub use self::types::{DeathReport, Progress, Step};
