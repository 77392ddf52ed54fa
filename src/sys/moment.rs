//! Points in a worker's task, other than system calls, at which a failpoint of a test can end the process. An errno has
//! no effect there.

use super::failpoint::failpoint;

/// Marks the moment at which a worker has taken a task or a control message, and has not read it yet.
#[inline]
pub fn task_taken() {
    let _: rustix::io::Result<()> = failpoint!("task_taken", Ok(()));
}

/// Marks the moment at which a worker is about to publish an answer.
#[inline]
pub fn task_done() {
    let _: rustix::io::Result<()> = failpoint!("task_done", Ok(()));
}
