//! The clock of the loader's `timeout`.

use std::time::Duration;

/// Runs while `next` waits, and starts anew at each result that arrives.
#[derive(Debug)]
pub(super) struct Clock {
    /// How long it runs.
    timeout: Option<Duration>,
    /// When it runs out; `None` while it stands.
    deadline: Option<Duration>,
    /// Whether it has run out and nobody has been told yet.
    expired: bool,
}

impl Clock {
    /// A clock that stands. Without a timeout it never runs.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, deadline: None, expired: false }
    }

    /// Starts the clock from zero.
    pub fn start(&mut self, now: Duration) {
        self.deadline = self.timeout.map(|timeout| now.saturating_add(timeout));
        self.expired = false;
    }

    /// A result has arrived: a clock that runs starts from zero.
    #[inline]
    pub fn result_arrived(&mut self, now: Duration) {
        if self.deadline.is_some() {
            self.start(now);
        }
    }

    /// Stops the clock: the caller has its answer.
    #[inline]
    pub fn stop(&mut self) {
        self.deadline = None;
        self.expired = false;
    }

    /// Notes whether the time has run out.
    pub fn look(&mut self, now: Duration) {
        self.expired = self.deadline.is_some_and(|deadline| now >= deadline);
    }

    /// Whether the time has run out.
    pub fn expired(&self) -> bool {
        self.expired
    }

    /// When the time runs out.
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }
}
