//! Forked children of a test.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::panic::{AssertUnwindSafe, catch_unwind};

pub struct Child(pub i32);

impl Child {
    /// Forks a child that runs `work`. Its exit code is 0 if `work` returns true, and otherwise 1.
    pub fn fork(work: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child works on copies of the test's objects, takes no lock but the allocator's, which the C library
        // resets, and ends with _exit, even if `work` panics.
        unsafe {
            let pid = libc::fork();
            assert!(pid >= 0);
            if pid == 0 {
                // If the test fails, no process is left behind.
                libc::alarm(600);
                libc::_exit(i32::from(!catch_unwind(AssertUnwindSafe(work)).unwrap_or(false)));
            }
            Self(pid)
        }
    }

    /// Forks a child that does nothing until a signal ends it.
    pub fn sleeping() -> Self {
        Self::fork(|| {
            loop {
                // SAFETY: pause has no precondition.
                unsafe { libc::pause() };
            }
        })
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: this is a child of this test that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.0, signal) }, 0);
    }

    /// Waits for its end. Returns its status.
    pub fn wait(self) -> i32 {
        let mut status = 0;
        // SAFETY: `status` is a local variable for the kernel to fill.
        assert_eq!(unsafe { libc::waitpid(self.0, &mut status, 0) }, self.0);
        status
    }

    pub fn kill(self) {
        self.signal(libc::SIGKILL);
        assert_eq!(self.wait(), libc::SIGKILL, "it ended by itself");
    }
}
