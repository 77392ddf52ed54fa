//! Points in a worker's task, other than system calls, at which a test's failpoint can stop or end the process. A
//! failpoint with an errno has no effect there.

use super::failpoint::failpoint;

/// Marks the moment at which a worker has taken a task or a control message, but has not read it yet.
#[inline]
pub fn task_taken() {
    let _: rustix::io::Result<()> = failpoint!("task_taken", Ok(()));
}

/// Marks the moment at which a worker is about to publish an answer.
#[inline]
pub fn task_done() {
    let _: rustix::io::Result<()> = failpoint!("task_done", Ok(()));
}
