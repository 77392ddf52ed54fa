//! The Python stacks of a stuck worker. Python's faulthandler dumps them from a signal handler, without the GIL, into a
//! memfd that the main process reads through /proc.

use std::os::fd::AsFd;
use std::time::Duration;

use super::report::Stall;
use crate::config::{STACK_CHECK, STACK_SETTLED, STACK_SHOWN, STACK_SIGNAL};
use crate::engine::handle::Handle;
use crate::engine::process::Process;
use crate::shm::layout::StackFile;
use crate::sync::Ordering;
use crate::sys;

impl Handle {
    /// Returns the Python stacks of a stuck worker's threads. The error says why they are unavailable. Call it without
    /// the GIL, because it waits.
    pub fn stack_of(&self, stall: &Stall) -> std::result::Result<String, String> {
        let worker = stall.worker;
        let patience = stall.patience.ok_or("RUSTLOADER_STALL_STACK_SECONDS is 0")?;
        let process = self.process(worker).ok_or("it was not started")?;
        if process.link.is_some() {
            return Err("it runs on another machine".into());
        }
        let page = &self.arena.control(worker).status;
        // SYNC: stack-file
        let fd = match StackFile::from_u32(page.stack.load(Ordering::Acquire)) {
            StackFile::Descriptor(fd) => fd,
            StackFile::NotYet => {
                return Err("it has not reached the loader's code yet, and may still be importing modules".into());
            }
            StackFile::Refused => {
                return Err("it could not create a file for its stack, or install the signal handler".into());
            }
            StackFile::SignalTaken => return Err(own_handler()),
        };
        let identity = (page.stack_device.load(Ordering::Relaxed), page.stack_inode.load(Ordering::Relaxed));
        // Open and check the file before sending the signal: faulthandler writes to the descriptor's number even if
        // another file has taken that number.
        let file = sys::proc_fd::open(process.pid, fd, identity);
        let file = file.map_err(|error| format!("the file for its stack cannot be read: {error}"))?;
        dump(&process, file.as_fd(), patience)
    }
}

fn own_handler() -> String {
    format!("it has its own handler for signal {} (SIGRTMIN+{STACK_SIGNAL})", sys::signal::stack_signal())
}

/// Sends the signal, waits up to `patience` for the dump, and returns it.
fn dump(
    process: &Process,
    file: std::os::fd::BorrowedFd<'_>,
    patience: Duration,
) -> std::result::Result<String, String> {
    if !process.descends {
        return Err("it is not a descendant of the main process, which therefore sends it no signals".into());
    }
    let signal = sys::signal::stack_signal();
    // Without a handler the signal would end the process.
    if !sys::signal::catches(process.pid, signal) {
        return Err(format!("it has removed the handler for signal {signal} (SIGRTMIN+{STACK_SIGNAL})"));
    }
    let start = sys::proc_fd::len(file);
    process.signal(signal);
    let deadline = sys::clock::monotonic() + patience;
    let (mut len, mut unchanged) = (start, 0);
    // On a busy machine the handler may be preempted, so a dump that has stopped growing may be incomplete. The signal
    // stays blocked while its handler runs.
    let is_complete = |unchanged| unchanged >= STACK_SETTLED && !sys::signal::blocks(process.pid, signal);
    while !is_complete(unchanged) && sys::clock::monotonic() < deadline {
        std::thread::sleep(STACK_CHECK);
        let new_len = sys::proc_fd::len(file);
        unchanged = if new_len == len && new_len > start { unchanged + 1 } else { 0 };
        len = new_len;
    }
    if len > start {
        return Ok(String::from_utf8_lossy(&sys::proc_fd::read(file, start, STACK_SHOWN)).into_owned());
    }
    let causes = format!("it is stopped, it is blocked in the kernel, or {}", own_handler());
    Err(format!("it did not answer within {} s: {causes}", patience.as_secs_f64()))
}
