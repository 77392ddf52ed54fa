//! The codes that the engine and the port answer with; the module exports them.

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
    END = 3, // the epoch has ended: None; or has begun: None, or whether it is as foreseen
    TIMED_OUT = 4, // None
    NO_PIN_THREAD = 5, // why the pin thread ended
    VACANT = 6, // the `Death` of a worker that may be replaced
    // Answers of `Port.receive`.
    RESUME = 1, // a new epoch begins, with the number of its first task and the message of `Engine.begin`
    LEAVE = 2, // the worker must leave
    UNREADABLE = 3, // a task whose index cannot be unpickled
    EARLY = 4, // as RESUME, before the current epoch has ended: its tasks follow, and there is no answer
    REWIND = 5, // as RESUME, in place of an epoch that has begun early
}

/// Any other answer of `Port.receive`: a task to fetch.
pub const FETCH: u8 = 0;
