//! Moments of a worker's task that are no system calls, for tests: a failpoint can end the process there. An errno has no
//! effect.

use super::failpoint::failpoint;

/// A worker has taken a task or a control message, and has not looked at it.
#[inline]
pub fn task_taken() {
    failpoint!("task_taken", (), ())
}

/// A worker is about to publish an answer.
#[inline]
pub fn task_done() {
    failpoint!("task_done", (), ())
}
