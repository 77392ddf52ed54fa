//! Every system call in the sources has a failpoint, or a listed reason to have none.

use std::path::{Path, PathBuf};

/// Calls without a failpoint: the file in src/sys, the call, and why.
const WITHOUT: &[(&str, &str, &str)] = &[
    ("clock.rs", "clock_gettime", "answered without the kernel (vDSO)"),
    ("clock.rs", "getrusage", "fails only for a wrong argument"),
    ("clock.rs", "sched_yield", "its result does not matter"),
    ("deferred_signals.rs", "raise", "where kill, which has a failpoint, is refused; cannot fail"),
    ("deferred_signals.rs", "syscall", "tgkill to this process; if it fails, kill is called, which has a failpoint"),
    ("left_behind.rs", "close", "in a forked child; what stays open ends with the child"),
    ("map.rs", "madvise", "called through populate and remove, which have one"),
    ("map.rs", "munlock", "its result does not matter: what stays locked cannot be released before the end"),
    ("map.rs", "munmap", "there is no caller left to report to; a failure leaks address space"),
    ("map.rs", "sysconf", "answered by the C library"),
    ("memfd.rs", "fcntl_get_seals", "called only after fcntl_add_seals, which has one, has failed"),
    ("private.rs", "_exit", "does not return"),
    ("private.rs", "mprotect", "the child ends if it fails"),
    ("private.rs", "mremap_fixed", "a failure is handled like that of mmap_anonymous, which has one"),
    ("private.rs", "poll", "its result does not matter: the wait has a limit"),
    ("proc_fd.rs", "seek", "the file was opened just before; a failure counts as an empty file"),
    ("proc_fd.rs", "pread", "a failure is handled like a short read; open has a failpoint"),
    ("sealed.rs", "munmap", "there is no caller left to report to; a failure leaks address space"),
    ("pidfd.rs", "strsignal", "no system call"),
    ("signal.rs", "_exit", "does not return"),
    ("signal.rs", "getppid", "cannot fail"),
    ("signal.rs", "gettid", "cannot fail"),
    ("signal.rs", "pthread_sigmask", "its result does not matter: signals then also reach rustloader's threads"),
    ("signal.rs", "sigaddset", "no system call"),
    ("signal.rs", "sigemptyset", "no system call"),
    ("signal.rs", "sigfillset", "no system call"),
    ("signal.rs", "sigtimedwait", "what is not taken is delivered when the mask is restored"),
    ("signal.rs", "sigismember", "no system call"),
    ("sigterm.rs", "__errno_location", "no system call"),
    ("sigterm.rs", "getpid", "cannot fail"),
    ("sigterm.rs", "raise", "in a signal handler; cannot fail"),
    ("sigterm.rs", "sigaction", "in a signal handler; the call outside of it has a failpoint"),
    ("sigterm.rs", "timer_settime", "in a signal handler; if it fails, the signal acts as it does without it"),
    ("socket.rs", "set_socket_keepalive", "fails for no socket"),
    ("socket.rs", "set_tcp_keepcnt", "fails only for sockets other than TCP's, which do not need it"),
    ("socket.rs", "set_tcp_keepidle", "as above"),
    ("socket.rs", "set_tcp_keepintvl", "as above"),
    ("socket.rs", "set_tcp_nodelay", "as above"),
    ("socket.rs", "set_tcp_user_timeout", "as above"),
    ("socket.rs", "shutdown", "fails only for a connection that has ended"),
    ("symbol.rs", "dlopen", "no system call for a library that is already loaded"),
    ("symbol.rs", "dlsym", "no system call"),
    ("thread.rs", "set_name", "the name is only informative; its result does not matter"),
];

/// Returns the sources under `folder`, without tests and comments.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_product = !path.ends_with("failpoint.rs") && path.file_stem().unwrap() != "tests";
        if path.is_dir() && is_product {
            all.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") && is_product {
            all.push((path.clone(), product_of(&std::fs::read_to_string(&path).unwrap())));
        }
    }
    all
}

/// Returns a source without items marked `#[cfg(test)]` and comment lines. It relies on rustfmt's layout: an item ends
/// with the first `;` or `}` at the end of a line that is indented like its beginning.
fn product_of(text: &str) -> String {
    let mut lines = Vec::new();
    let mut test_at = None;
    for line in text.lines() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        match test_at {
            None if code == "#[cfg(test)]" => test_at = Some(indent),
            None if code.starts_with("//") => {}
            None => lines.push(line),
            Some(begin) if begin == indent && code.ends_with([';', '}']) => test_at = None,
            Some(_) => {}
        }
    }
    assert_eq!(test_at, None, "a test module has no end");
    lines.join("\n")
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Returns the position and the function's name of each call of libc or rustix by its full path.
fn calls(text: &str) -> Vec<(usize, &str)> {
    let heads = ["libc::", "rustix::"];
    let starts = heads.iter().flat_map(|head| text.match_indices(head).map(|(at, head)| at + head.len()));
    let name = |at: usize| {
        let rest = &text[at..];
        let end = rest.find(|c: char| c != '_' && c != ':' && !c.is_ascii_alphanumeric())?;
        let path = rest[end..].starts_with('(').then_some(&rest[..end])?;
        (!path.contains(|c: char| c.is_ascii_uppercase())).then_some((at, path.rsplit(':').next()?))
    };
    starts.filter_map(name).collect()
}

/// Returns imported functions and modules, whose calls [`calls`] would not find. Types and constants begin with a
/// capital, and `retry_on_intr` makes no system call.
fn imports(text: &str) -> Vec<&str> {
    let is_import = |line: &&str| line.contains("use libc::") || line.contains("use rustix::");
    let names = |line| str::trim_matches(line, ['{', '}', ';']).split(", ");
    let imported = text.lines().filter(is_import).filter_map(|line| line.rsplit("::").next()).flat_map(names);
    imported.filter(|name| !name.starts_with(char::is_uppercase) && *name != "retry_on_intr").collect()
}

/// Describes what in a source belongs in `sys`, or lacks a failpoint there.
fn faults(path: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let file = path.file_name().unwrap().to_str().unwrap();
    problems.extend(imports(text).iter().map(|name| format!("{name} is imported in {file}")));
    for (at, name) in calls(text) {
        if !path.parent().unwrap().ends_with("sys") {
            problems.push(format!("{name} is called in {}", path.display()));
        }
        // The macro is around the call, or around a closure defined a line or two earlier.
        let near = String::from_utf8_lossy(&text.as_bytes()[at.saturating_sub(130)..text.len().min(at + 260)]);
        let known = WITHOUT.iter().any(|(place, call, _)| (*place, *call) == (file, name));
        if !near.contains("failpoint!(\"") && !known {
            problems.push(format!("{name} in {file} has no failpoint"));
        }
    }
    let files = text.matches("std::fs::").count();
    if files > usize::from(path.ends_with("sys/mod.rs")) {
        problems.push(format!("a file is read in {file}"));
    }
    let starts_named = text.contains("thread::Builder") && file != "thread.rs";
    if starts_named || text.contains("std::thread::spawn(") {
        problems.push(format!("a thread is started in {file}"));
    }
    problems
}

#[test]
fn calls_are_in_sys_and_have_a_failpoint() {
    let mut unused: Vec<_> = WITHOUT.iter().collect();
    let mut count = 0;
    for (path, text) in sources(&src()) {
        assert_eq!(faults(&path, &text), Vec::<String>::new());
        let file = path.file_name().unwrap().to_str().unwrap();
        for (_, name) in calls(&text) {
            count += 1;
            unused.retain(|(place, call, _)| (*place, *call) != (file, name));
        }
    }
    assert!(count > 30, "only {count} calls are found");
    assert!(unused.is_empty(), "entries that match no call: {unused:?}");
}

#[test]
fn a_call_in_the_wrong_place_or_without_a_failpoint_is_found() {
    let bad = [
        ("src/engine/handle.rs", "failpoint!(\"x\", libc::kill(pid, 0))", "kill is called in src/engine/handle.rs"),
        ("src/sys/pidfd.rs", "unsafe { libc::kill(pid, 0) }", "kill in pidfd.rs has no failpoint"),
        ("src/sys/pidfd.rs", "unsafe { libc::munmap(begin, len) }", "munmap in pidfd.rs has no failpoint"),
        ("src/sys/map.rs", "rustix::fs::fstat(fd)", "fstat in map.rs has no failpoint"),
        ("src/store/mod.rs", "failpoint!(\"x\", rustix::fs::sync())", "sync is called in src/store/mod.rs"),
        ("src/sys/map.rs", "use rustix::fs::fstat;", "fstat is imported in map.rs"),
        ("src/sys/map.rs", "use rustix::event::{PollFd, poll};", "poll is imported in map.rs"),
        ("src/config.rs", "std::fs::read(path)", "a file is read in config.rs"),
        ("src/sys/mod.rs", "std::fs::read(path); std::fs::read(path)", "a file is read in mod.rs"),
        ("src/engine/pin.rs", "thread::Builder::new()", "a thread is started in pin.rs"),
        ("src/sys/thread.rs", "std::thread::spawn(work)", "a thread is started in thread.rs"),
    ];
    for (path, code, fault) in bad {
        // The code comes after a test module, a test function and a comment, as in a source.
        let text = format!(
            "#[cfg(test)]\nmod tests;\n// libc::read(x)\n#[cfg(test)]\n#[cfg(not(loom))]\nmod more {{\n    fn f() {{\n        \
             libc::write(x);\n    }}\n}}\n\nimpl A {{\n    #[cfg(test)]\n    fn g() {{ libc::open(x) }}\n\n    fn h() {{\n        \
             {code}\n    }}\n}}\n"
        );
        assert_eq!(faults(Path::new(path), &product_of(&text)), [fault]);
    }
    for (path, code) in [
        ("src/sys/pidfd.rs", "failpoint!(\"x\", libc::kill(pid, 0))"),
        ("src/sys/map.rs", "rustix::mm::munmap(begin, len)"),
        ("src/sys/map.rs", "use rustix::io::{Errno, retry_on_intr};\nuse rustix::mm::Advice;"),
    ] {
        assert_eq!(faults(Path::new(path), code), Vec::<String>::new());
    }
}

#[test]
fn the_code_after_a_test_module_is_product() {
    let whole = std::fs::read_to_string(src().join("scheduler/mod.rs")).unwrap();
    let code = |text: &str| text.lines().filter(|line| !line.trim_start().starts_with("//")).count();
    // The two lines are `#[cfg(test)]` and `mod tests;`.
    assert!(whole.contains("#[cfg(test)]\nmod tests;\n"));
    assert_eq!(code(&product_of(&whole)), code(&whole) - 2);
}

#[cfg(feature = "failpoints")]
#[test]
fn every_kind_of_failpoint_is_used() {
    use std::collections::BTreeSet;
    let all: String = sources(&src().join("sys")).into_iter().map(|(_, text)| text).collect();
    let used: BTreeSet<&str> = all.split("failpoint!(\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let listed: BTreeSet<&str> = rustloader::sys::failpoint::kinds().iter().copied().collect();
    assert_eq!(used, listed);
}
