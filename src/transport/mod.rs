//! Tasks and batches over a connection to another machine.
//!
//! The contract between the engine and a worker is a pair of rings in an arena, with blocks for data that does not fit
//! into an entry. A worker on another machine has its own arena, and this module copies between the two arenas:
//!
//! ```text
//! main process                                      the worker's machine
//! engine -> task ring -> Link  == socket ==>  Remote -> task ring -> Port -> the worker's loop
//! engine <- result ring <- Link  <== socket ==  Remote <- result ring <- Port <- the worker's loop
//! ```
//! So neither the scheduler nor the worker's loop knows about the connection, and local workers pay nothing for it. One
//! test suite (`tests/transport.rs`) checks that both kinds of workers follow the same rules. A [`Link`] owns the
//! worker's region of the main process's arena, as a local worker does, and receives batches directly into blocks of
//! that region. The link does not need the GIL.
//!
//! A frame begins with [`frame::Head`]. Each length is checked against the sizes of the arena before the data is
//! received. An invalid frame ends the connection, and the end of a connection counts as the end of its worker. The
//! engine waits on an eventfd of the link instead of a pidfd, so deaths, restarts and shutdown work as for local
//! workers. The exit status of such a worker is unknown. The kernel probes an idle connection
//! ([`LINK_SILENCE`](crate::config::LINK_SILENCE)), so there are no heartbeats.
//!
//! While the consumer holds all memory of the region, the link reads nothing from the socket; after
//! [`LINK_MEMORY_WAIT`](crate::config::LINK_MEMORY_WAIT) it closes the connection. The regions of the worker's arena
//! are no larger than those of the main process's arena, so the worker itself rejects a batch that is too large for the
//! main process. The links divide the tasks of a shared queue among themselves: each claims tasks for its worker, up to
//! [`LINK_CREDIT`](crate::config::LINK_CREDIT). The status page in the main process's arena shows the task that the
//! worker is working on, as far as the link knows, and the counters from the last result.

pub mod counters;
pub mod frame;
mod frame_reader;
mod frame_writer;
pub mod link;
pub mod remote;

pub use self::link::Link;
pub use self::remote::Remote;
