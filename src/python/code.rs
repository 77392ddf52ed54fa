//! The codes that the engine and the port answer with; the module exports them.

/// Defines codes, and the list of all with their names.
macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(pub const $name: u8 = $value;)*
        pub const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),*];
    };
}

codes! {
    // Answers of `Engine.next` and `Engine.begin`. BATCH: a batch.
    BATCH = 0,
    // An error in a batch's place: its wrapper.
    ERROR = 1,
    // A worker died: its `Death`.
    DEAD = 2,
    // The epoch has ended, or has begun: None.
    END = 3,
    // The timeout expired: None.
    TIMED_OUT = 4,
    // The pin thread ended: its error text.
    NO_PIN_THREAD = 5,

    // Answers of `Port.receive`. RESUME: a new epoch begins.
    RESUME = 1,
    // The worker must leave.
    LEAVE = 2,
    // A task whose index cannot be unpickled.
    UNREADABLE = 3,
}

/// An answer of `Port.receive`: a task to fetch. Python treats every other number so.
pub const FETCH: u8 = 0;
