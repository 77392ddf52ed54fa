//! A trace: what the main process and the workers do, and when.
//!
//! An [`Event`] is a fixed record of a clock, a length and numbers. A worker writes its own into a ring in the arena
//! ([`Recorder`]), the main process empties the rings in `next` ([`Source`]) and appends its own, and a [`Sink`] writes
//! all to a file that Python turns into slices (`python/rustloader/tracing`). An event's entry is published by one
//! Release store (`shm::ring`), so a worker that is killed leaves no half of one. All clocks are CLOCK_MONOTONIC.
//!
//! Without a trace a worker reads one word of the arena's head, and the main process one of its own, at each change of
//! state.

mod event;
mod recorder;
mod sink;
mod source;
#[cfg(test)]
mod tests;

pub use self::event::{Event, Kind, MAIN, PINNER};
pub use self::recorder::Recorder;
pub use self::sink::Sink;
pub use self::source::Source;
