//! The codes with which the engine and the port answer. The Python module exports them as constants.

/// Defines each code as a constant, and `ALL` as the list of all codes with their names.
macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        $(pub const $name: u8 = $value;)*
        pub const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),*];
    };
}

codes! {
    // Answers of `Engine.next` and `Engine.begin`, each with the value that comes with it.
    BATCH = 0, // the batch
    ERROR = 1, // the wrapper of an error that takes a batch's place
    DEAD = 2, // the `Death` of a worker
    // From `next`, None: the epoch has ended. From `begin`: the epoch has begun; None, or if it began early, True if
    // the prediction was correct, else False.
    END = 3,
    TIMED_OUT = 4, // None: the loader's `timeout` has passed
    NO_PIN_THREAD = 5, // the reason why the pin thread ended
    VACANT = 6, // the `Death` of a worker that may be replaced
    // Answers of `Port.receive`.
    RESUME = 1, // a new epoch begins; comes with the number of its first task and the message of `Engine.begin`
    LEAVE = 2, // the worker must leave
    UNREADABLE = 3, // a task whose index batch cannot be unpickled
    EARLY = 4, // like RESUME, but before the current epoch has ended; its tasks follow, and the worker does not answer
    REWIND = 5, // like RESUME, but the epoch replaces an epoch that began early
}

/// The usual answer of `Port.receive`: a task to fetch. Python needs no constant for it.
pub const FETCH: u8 = 0;
