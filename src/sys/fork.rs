//! Fork handlers: the steps of this crate, in one order, and the number of forks so far.

use std::cell::Cell;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::io::Errno;

use super::failpoint::failpoint;
use super::refused;
use crate::error::Result;

/// A step that runs around forks. Parent and child run the steps in this order, [`ForkHandlers::prepare`] in the
/// reverse one. The order of their installation does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Counts the forks ([`generation`]). First: the functions that the other steps call in a child must see that it is
    /// one.
    Generation,
    /// `left_behind`: closes connections in the child. Before the arrays: the parent gives the list's lock back before
    /// it waits for the copies, so that no thread waits with it.
    Connections,
    /// `shm::forks`: marks the blocks that the child may read. Before the arrays, for the same reason: the marks are
    /// filed, and the caretaker may go on, before the parent waits.
    Blocks,
    /// `worker::arrays`: the child copies the arrays of a worker while the parent waits. Last in both, and first before
    /// the fork: no array is made or freed while the other steps look at the blocks.
    Arrays,
}

impl Step {
    /// All steps, in their order.
    pub const ALL: [Self; 4] = [Self::Generation, Self::Connections, Self::Blocks, Self::Arrays];
}

/// The functions of a step. A panic ends only that part of it.
#[derive(Debug)]
pub struct ForkHandlers {
    /// Runs before every fork, in the forking thread.
    pub prepare: fn(),
    /// Runs in the parent after it, in the same thread, also if the fork fails.
    pub parent: fn(),
    /// Runs in the child. Must be safe after a fork of a process with threads.
    pub child: fn(),
}

/// Forks between this process and the one that called first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The handlers of each step that is installed, by its place in [`Step::ALL`].
static INSTALLED: [AtomicPtr<ForkHandlers>; Step::ALL.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; Step::ALL.len()];
/// True if the C library calls this module at forks.
static HOOKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The steps of the fork that this thread has in progress, a bit each: those that were installed before it.
    static RUNNING: Cell<u32> = const { Cell::new(0) };
}

/// Returns a number that differs in every forked child: an object that stores it knows later whether it was made before
/// a fork. One atomic load. `vfork` and a bare `clone` do not raise it.
#[inline]
pub fn generation() -> u64 {
    // SYNC: forks-counted (pairs with the Release in `hook`): the flag implies the hooks.
    if !HOOKED.load(Ordering::Acquire) {
        // Callers that depend on it have called `count_forks` before.
        let _ = hook();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// Installs the counter of [`generation`].
pub fn count_forks() -> Result<()> {
    // SYNC: forks-counted (pairs with the Release in `hook`).
    if HOOKED.load(Ordering::Acquire) { Ok(()) } else { hook() }
}

/// Installs the handlers of a step. A second call for it in a process changes nothing and returns false.
pub fn on_fork(step: Step, handlers: &'static ForkHandlers) -> Result<bool> {
    count_forks()?;
    Ok(install(step, handlers))
}

fn install(step: Step, handlers: &'static ForkHandlers) -> bool {
    let (none, handlers) = (std::ptr::null_mut(), std::ptr::from_ref(handlers).cast_mut());
    // SYNC: forks-handled (pairs with the Acquire in `handlers`): a fork that sees the pointer sees the handlers.
    INSTALLED[step as usize].compare_exchange(none, handlers, Ordering::Release, Ordering::Relaxed).is_ok()
}

#[cold]
fn hook() -> Result<()> {
    static COUNTER: ForkHandlers = ForkHandlers { prepare: || (), parent: || (), child: raise_generation };
    install(Step::Generation, &COUNTER);
    // Two concurrent calls install the hooks twice; the second of two in one fork finds nothing to do.
    // SAFETY: the hooks are plain functions that stay as long as the process (the library is not unloaded).
    let call = || match unsafe { libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child)) }
    {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    };
    failpoint!("atfork", call())
        .map_err(|errno| refused("pthread_atfork", errno, "the C library has no memory left"))?;
    // SYNC: forks-counted (pairs with the Acquires in `generation` and `count_forks`).
    HOOKED.store(true, Ordering::Release);
    Ok(())
}

fn raise_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn handlers(step: Step) -> Option<&'static ForkHandlers> {
    // SYNC: forks-handled.
    // SAFETY: the pointer is null or that of a static reference.
    unsafe { INSTALLED[step as usize].load(Ordering::Acquire).as_ref() }
}

/// Runs a part of the steps in `running`. A panic must not cross into the C library, nor stop the other steps.
fn run(steps: impl Iterator<Item = Step>, running: u32, part: fn(&ForkHandlers) -> fn()) {
    for step in steps.filter(|&step| running & bit(step) != 0) {
        if let Some(handlers) = handlers(step) {
            let _ = catch_unwind(part(handlers));
        }
    }
}

const fn bit(step: Step) -> u32 {
    1 << step as u32
}

extern "C" fn before_fork() {
    if RUNNING.get() == 0 {
        // A step that another thread installs from now on takes no part: it has prepared nothing.
        let installed = Step::ALL.into_iter().filter(|&step| handlers(step).is_some()).map(bit).sum();
        RUNNING.set(installed);
        run(Step::ALL.into_iter().rev(), installed, |handlers| handlers.prepare);
    }
}

extern "C" fn after_in_parent() {
    run(Step::ALL.into_iter(), RUNNING.take(), |handlers| handlers.parent);
}

extern "C" fn after_in_child() {
    run(Step::ALL.into_iter(), RUNNING.take(), |handlers| handlers.child);
}
