//! Starting and naming the crate's threads.

use std::ffi::CStr;

use super::failpoint::failpoint;

/// Starts a detached thread with `stack` bytes of stack. `work` must block signals itself.
pub fn spawn(name: &str, stack: usize, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    spawn_joinable(name, stack, work).map(drop)
}

/// Starts a thread as [`spawn`] does, but returns a handle to join it.
pub fn spawn_joinable(
    name: &str,
    stack: usize,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let builder = std::thread::Builder::new().name(name.into()).stack_size(stack);
    failpoint!("thread", builder.spawn(work))
}

/// Names the calling thread for `ps -L`, `py-spy` and debuggers. The kernel keeps at most 15 bytes.
pub fn set_name(name: &str) {
    let mut text = [0_u8; 16];
    let mut end = name.len().min(15);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].copy_from_slice(&name.as_bytes()[..end]);
    if let Ok(text) = CStr::from_bytes_until_nul(&text) {
        let _ = rustix::thread::set_name(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> String {
        std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim_end().to_owned()
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let thread = std::thread::spawn(|| {
            set_name("loader-pin");
            assert_eq!(name(), "loader-pin");
            set_name("loader-pin-abcdé");
            assert_eq!(name(), "loader-pin-abcd");
        });
        thread.join().unwrap();
    }
}
