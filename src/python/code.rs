//! The codes of the answers of the engine and the port. The module exports them.

/// Defines codes, and the list of all with their names.
macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(pub const $name: u8 = $value;)*
        pub const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),*];
    };
}

codes! {
    // Answers of `Engine.next` and `Engine.begin`, and the value of each.
    BATCH = 0, // the batch
    ERROR = 1, // the wrapper of an error in a batch's place
    DEAD = 2, // the `Death` of a worker
    END = 3, // None: the epoch has ended; of `begin`, it has begun: None, or True if it was predicted correctly
    TIMED_OUT = 4, // None
    NO_PIN_THREAD = 5, // the reason why the pin thread ended
    VACANT = 6, // the `Death` of a worker that may be replaced
    // Answers of `Port.receive`.
    RESUME = 1, // a new epoch begins, with the number of its first task and the message of `Engine.begin`
    LEAVE = 2, // the worker must leave
    UNREADABLE = 3, // a task whose index cannot be unpickled
    EARLY = 4, // like RESUME, before the current epoch has ended: its tasks follow, and the worker does not answer
    REWIND = 5, // like RESUME, but the epoch replaces one that began early
}

/// Any other answer of `Port.receive`: a task to fetch.
pub const FETCH: u8 = 0;
