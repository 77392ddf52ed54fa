//! The answer codes of the engine and the port. The Python module exports them as constants.

/// Defines each code as a constant, and `ALL` as the list of all codes with their names.
macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(pub const $name: u8 = $value;)*
        pub const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),*];
    };
}

codes! {
    // Answers of `Engine.next` and `Engine.begin`, each with its value.
    BATCH = 0, // the batch
    ERROR = 1, // the wrapper of an error that takes a batch's place
    DEAD = 2, // the `Death` of a worker
    // From `next`: the epoch has ended; the value is None. From `begin`: the epoch has begun; the value is None or, if
    // the epoch began early, whether the prediction was correct.
    END = 3,
    TIMED_OUT = 4, // None: the loader's `timeout` has passed
    NO_PIN_THREAD = 5, // the reason why the pin thread ended
    VACANT = 6, // the `Death` of a worker that may be replaced
    // Answers of `Port.receive`.
    RESUME = 1, // a new epoch begins; the values are the number of its first task and the message of `Engine.begin`
    LEAVE = 2, // the worker must exit
    UNREADABLE = 3, // a task whose index batch cannot be unpickled
    // Like RESUME, but the current epoch has not ended yet. The new epoch's tasks follow; the worker sends no reply.
    EARLY = 4,
    REWIND = 5, // like RESUME, but the epoch replaces one that began early
}

/// The code of a task to fetch, the usual answer of `Port.receive`. It is not exported, because Python compares only
/// with the other codes.
pub const FETCH: u8 = 0;
