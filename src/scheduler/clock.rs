//! The clock of the loader's `timeout`.

use std::time::Duration;

/// A countdown that runs while `next` waits, and restarts at each result.
#[derive(Debug)]
pub(super) struct Clock {
    timeout: Option<Duration>,
    /// `None` while the clock is stopped.
    pub deadline: Option<Duration>,
    /// True if the timeout has expired and has not been reported yet.
    pub expired: bool,
}

impl Clock {
    /// Creates a stopped clock. If `timeout` is `None`, it never runs.
    pub fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, deadline: None, expired: false }
    }

    pub fn start(&mut self, now: Duration) {
        self.deadline = self.timeout.map(|timeout| now.saturating_add(timeout));
        self.expired = false;
    }

    /// Restarts the clock if it is running.
    #[inline]
    pub fn result_arrived(&mut self, now: Duration) {
        if self.deadline.is_some() {
            self.start(now);
        }
    }

    #[inline]
    pub fn stop(&mut self) {
        self.deadline = None;
        self.expired = false;
    }

    /// Sets `expired` to true if the deadline has passed, and otherwise to false.
    pub fn check(&mut self, now: Duration) {
        self.expired = self.deadline.is_some_and(|deadline| now >= deadline);
    }
}
