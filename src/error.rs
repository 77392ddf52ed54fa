//! The only error type of the core. Only `src/interop/errors.rs` turns it into Python exceptions.

use std::fmt;

/// The errors of this crate. Their messages name the cause and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A system call failed.
    Os {
        /// The call's name, as in its manual page.
        call: &'static str,
        /// The value of `errno`.
        errno: i32,
        /// The purpose and the remedy; may be empty.
        hint: String,
    },
    /// A value in shared memory failed its check, probably because a broken worker overwrote it.
    Corrupt {
        /// The invalid value, in words, and the expected one where that helps.
        what: String,
    },
    /// The connection to a worker on another machine was closed in the middle of a frame, or a frame is damaged.
    Connection {
        /// What happened, in words.
        what: String,
    },
    /// The shared memory belongs to another version of this library.
    Layout {
        /// The layout version of the shared memory.
        found: u32,
        /// The layout version that this library reads.
        expected: u32,
    },
    /// The machine, or the memory cgroup, has too little memory for a batch.
    NoMemory {
        /// Bytes requested.
        wanted: u64,
        /// The limit that prevents the allocation, in words (a memory cgroup, the machine).
        limit: String,
        /// Bytes below the limit that are still available to a batch.
        headroom: u64,
        /// True if only reservations of other workers prevent the allocation, so that a retry may succeed.
        passing: bool,
    },
    /// The system refused ordinary memory for a batch.
    NoHeap {
        /// Bytes requested.
        wanted: u64,
    },
    /// The loader's settings exceed the engine's limits.
    TooMany {
        /// `num_workers`.
        workers: u64,
        /// `prefetch_factor`.
        prefetch_factor: u64,
        /// The limit that the settings exceed, in words.
        limit: String,
    },
    /// A worker's region of the shared memory has no room for a batch, although the machine may have enough memory.
    RegionFull {
        /// Bytes requested.
        wanted: u64,
        /// Bytes of the region.
        size: u64,
        /// Bytes of the region that are idle.
        idle: u64,
        /// Bytes of the longest contiguous idle range.
        longest: u64,
    },
    /// The machine, or the memory cgroup, has too little memory for a shared object.
    ShareMemory {
        /// Bytes that the next write needed.
        wanted: u64,
        /// Bytes of the object that were already written.
        written: u64,
        /// The limit that prevents the write, in words.
        limit: String,
        /// Bytes below the limit that are still available.
        headroom: u64,
    },
    /// A descriptor or an image that the caller passed does not hold a readable shared object or cache.
    Foreign {
        /// What is wrong with it, in words.
        what: String,
    },
    /// A forked child used an object that belongs to its parent.
    Child {
        /// A message that names the object and the remedy.
        what: &'static str,
    },
    /// The caller broke a rule of the interface: a bug in rustloader, not in the user's program.
    Usage {
        /// The violated rule, or the violation, in words.
        what: String,
    },
}

/// The result type of the core.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Creates an [`Error::Corrupt`].
    pub fn corrupt(what: impl Into<String>) -> Self {
        Self::Corrupt { what: what.into() }
    }

    /// Creates an [`Error::Connection`].
    pub fn connection(what: impl Into<String>) -> Self {
        Self::Connection { what: what.into() }
    }

    /// Turns [`Error::Corrupt`] into [`Error::Connection`], for a value that was received over a connection. Returns
    /// any other error unchanged.
    pub fn received(self) -> Self {
        match self {
            Self::Corrupt { what } => Self::Connection { what },
            other => other,
        }
    }

    /// Creates an [`Error::Foreign`].
    pub fn foreign(what: impl Into<String>) -> Self {
        Self::Foreign { what: what.into() }
    }

    /// Creates an [`Error::Usage`].
    pub fn usage(what: impl Into<String>) -> Self {
        Self::Usage { what: what.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os { call, errno, hint } => {
                write!(f, "{call} failed: {}", std::io::Error::from_raw_os_error(*errno))?;
                if hint.is_empty() { Ok(()) } else { write!(f, "; {hint}") }
            }
            Self::Corrupt { what } => write!(f, "shared memory of the DataLoader is damaged: {what}"),
            Self::Connection { what } => write!(f, "the connection broke: {what}"),
            Self::Layout { found, expected } => write!(
                f,
                "the shared memory has layout version {found}, and this rustloader ({}) reads version {expected}: use \
                 the rustloader of that process's environment",
                env!("CARGO_PKG_VERSION")
            ),
            Self::NoMemory { wanted, limit, headroom, .. } => {
                no_memory(f, *wanted, format_args!("{limit}, {headroom} bytes are left"))
            }
            Self::NoHeap { wanted } => write!(
                f,
                "cannot get {wanted} bytes of memory for a batch: the system refused them; use a smaller batch_size or \
                 num_workers"
            ),
            Self::TooMany { workers, prefetch_factor, limit } => write!(
                f,
                "num_workers={workers} with prefetch_factor={prefetch_factor} is too much: {limit}; use a smaller \
                 num_workers or prefetch_factor"
            ),
            Self::RegionFull { wanted, size, idle, longest } => {
                let used = size.saturating_sub(*idle);
                let limit = format_args!(
                    "each worker's region of the shared memory has {size} bytes; in this one, {used} bytes are in use \
                     and {idle} bytes are idle, at most {longest} of them in one piece"
                );
                no_memory(f, *wanted, limit)
            }
            Self::ShareMemory { wanted, written, limit, headroom } => write!(
                f,
                "cannot share this object: {wanted} bytes are needed in addition to {written} bytes written so far, \
                 {limit}, and {headroom} bytes are left; share less, free memory, or raise the limit"
            ),
            Self::Foreign { what } => {
                write!(f, "rustloader {} cannot read this as a shared object: {what}", env!("CARGO_PKG_VERSION"))
            }
            Self::Child { what } => f.write_str(what),
            Self::Usage { what } => {
                write!(f, "internal error in rustloader (please report this): {what}")
            }
        }
    }
}

fn no_memory(f: &mut fmt::Formatter<'_>, wanted: u64, limit: fmt::Arguments<'_>) -> fmt::Result {
    write!(
        f,
        "cannot get {wanted} bytes of shared memory for a batch: {limit}; use a smaller batch_size, num_workers or \
         prefetch_factor, or keep fewer batches"
    )
}

impl std::error::Error for Error {}
