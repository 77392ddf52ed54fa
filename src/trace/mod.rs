//! Traces, which record what the main process and the workers do, and when.
//!
//! An [`Event`] is a fixed-size record of a start time, a duration and a few numbers. A worker writes its events into a
//! ring in the arena ([`Recorder`]). The main process empties the rings in `next` ([`Source`]) and adds its own events.
//! A [`Sink`] writes all of them to a file that Python turns into slices (`python/rustloader/tracing`). An event's
//! entry is published by one Release store (`shm::ring`), so a killed worker never leaves half an event. All times are
//! read from CLOCK_MONOTONIC.
//!
//! A program that is killed leaves its trace, up to a fraction of a second: every
//! [`TRACE_FLUSH`](crate::config::TRACE_FLUSH), a thread empties the rings and writes what is buffered, and also the
//! activities that are still in progress ([`Spooler`]).
//!
//! While no trace is on, each change of state costs a worker only one read of a word in the arena's header, and costs
//! the main process only one read of an atomic flag.

mod event;
mod recorder;
mod sink;
mod source;
mod spooler;
#[cfg(test)]
mod tests;

pub use self::event::{Event, Kind, MAIN, PINNER};
pub use self::recorder::Recorder;
pub use self::sink::Sink;
pub use self::source::Source;
pub use self::spooler::Spooler;
