//! Every system call has its failpoint, or a reason to have none: read out of the sources.

use std::path::{Path, PathBuf};

/// Calls without a failpoint: the file in src/sys, the call, and why.
const WITHOUT: &[(&str, &str, &str)] = &[
    ("clock.rs", "clock_gettime", "answered without the kernel (vDSO)"),
    ("clock.rs", "getrusage", "refused only for a wrong argument"),
    ("clock.rs", "sched_yield", "its answer does not matter"),
    ("fork.rs", "pthread_atfork", "handed to at_fork, which has one"),
    ("deferred_signals.rs", "raise", "to the calling thread; cannot be refused"),
    ("map.rs", "madvise", "handed to populate and remove, which have one"),
    (
        "map.rs",
        "munlock",
        "its answer does not matter: what stays locked cannot be given back before the end",
    ),
    ("map.rs", "munmap", "nobody is left to tell; a refusal keeps address space"),
    ("map.rs", "sysconf", "answered by the C library"),
    ("memfd.rs", "fcntl", "F_GET_SEALS, after F_ADD_SEALS, which has one, was refused"),
    ("proc_fd.rs", "lseek", "the file was opened just before; a refusal is an empty file"),
    ("proc_fd.rs", "pread", "a short answer and none are the same; open has a failpoint"),
    ("pidfd.rs", "strsignal", "no system call"),
    ("poll.rs", "getpid", "cannot be refused"),
    ("signal.rs", "_exit", "does not come back"),
    ("signal.rs", "getppid", "cannot be refused"),
    (
        "signal.rs",
        "pthread_sigmask",
        "its answer does not matter: signals then reach a thread of ours as well",
    ),
    ("signal.rs", "sigaddset", "no system call"),
    ("signal.rs", "sigemptyset", "no system call"),
    ("signal.rs", "sigfillset", "no system call"),
    ("signal.rs", "sigismember", "no system call"),
    ("signal.rs", "syscall", "gettid, which cannot be refused"),
    ("sigterm.rs", "__errno_location", "no system call"),
    ("sigterm.rs", "getpid", "cannot be refused"),
    ("sigterm.rs", "raise", "in a signal's handler; cannot be refused"),
    ("sigterm.rs", "sigaction", "in a signal's handler; the one outside of it has a failpoint"),
    (
        "sigterm.rs",
        "timer_settime",
        "in a signal's handler; refused, the signal does what it does without it",
    ),
    ("symbol.rs", "dlopen", "no system call for what is loaded already"),
    ("symbol.rs", "dlsym", "no system call"),
    ("thread.rs", "prctl", "a name for people; its answer does not matter"),
];

/// The sources under `folder`, their tests and comments cut off.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("failpoint.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            found.push((path, lines.join("\n")));
        }
    }
    found
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Each place of `head` followed by a name and an opening parenthesis: the place and the name.
fn calls<'a>(text: &'a str, head: &str) -> Vec<(usize, &'a str)> {
    let starts = text.match_indices(head).map(|(at, _)| at + head.len());
    let name = |at: usize| {
        let rest = &text[at..];
        let end = rest.find(|c: char| c != '_' && !c.is_ascii_alphanumeric())?;
        rest[end..].starts_with('(').then_some((at, &rest[..end]))
    };
    starts.filter_map(name).filter(|(_, name)| name.chars().all(|c| !c.is_ascii_uppercase())).collect()
}

#[test]
fn calls_stand_in_sys_and_have_a_failpoint() {
    let mut unused: Vec<_> = WITHOUT.iter().collect();
    let mut seen = 0;
    for (path, text) in sources(&src()) {
        let file = path.file_name().unwrap().to_str().unwrap();
        for (at, name) in calls(&text, "libc::") {
            seen += 1;
            assert!(path.parent().unwrap().ends_with("sys"), "{name} is called in {}", path.display());
            // The macro stands around the call, or around a closure named a line or two before.
            let near = &text[at.saturating_sub(130)..text.len().min(at + 260)];
            let known = WITHOUT.iter().any(|(place, call, _)| (*place, *call) == (file, name));
            assert!(near.contains("failpoint!(\"") || known, "{name} in {file} has no failpoint");
            unused.retain(|(place, call, _)| (*place, *call) != (file, name));
        }
        let files = text.matches("std::fs::").count();
        assert!(files == 0 || (path.ends_with("sys/mod.rs") && files == 1), "a file is read in {file}");
        assert!(!text.contains("thread::Builder") || file == "thread.rs", "a thread is started in {file}");
        assert!(!text.contains("std::thread::spawn("), "a thread is started in {file}");
    }
    assert!(seen > 30, "only {seen} calls were found");
    assert!(unused.is_empty(), "reasons that nobody needs: {unused:?}");
}

#[cfg(feature = "failpoints")]
#[test]
fn every_kind_of_failpoint_is_used() {
    use std::collections::BTreeSet;
    let all: String = sources(&src().join("sys")).into_iter().map(|(_, text)| text).collect();
    let used: BTreeSet<&str> =
        all.split("failpoint!(\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let listed: BTreeSet<&str> = rustloader::sys::failpoint::kinds().iter().copied().collect();
    assert_eq!(used, listed);
}
