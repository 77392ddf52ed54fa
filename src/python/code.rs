//! The numbers that the engine and the port answer with. Python has them from here.

/// Defines the numbers, and the list of them that the module gets.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        $($(#[$doc])* pub const $name: u8 = $value;)*

        /// Each by its name.
        pub const ALL: &[(&str, u8)] = &[$((stringify!($name), $name)),*];
    };
}

// What `Engine.next` and `Engine.begin` answer, and the value beside it.
codes! {
    /// A batch: the batch.
    BATCH = 0;
    /// An error in a batch's place: its wrapper.
    ERROR = 1;
    /// A worker has died: its `Death`.
    DEAD = 2;
    /// The epoch is at its end, or has begun: nothing.
    END = 3;
    /// The timeout has expired: nothing.
    TIMED_OUT = 4;
    /// The pin thread has ended: why.
    NO_PIN_THREAD = 5;

    // What `Port.receive` answers.

    /// A new epoch begins.
    RESUME = 1;
    /// The worker is to leave.
    LEAVE = 2;
    /// A task whose index cannot be loaded.
    UNREADABLE = 3;
}

/// As the others of `Port.receive`: a task to be fetched. Python treats every other number so.
pub const FETCH: u8 = 0;
