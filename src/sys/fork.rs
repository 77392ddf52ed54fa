//! Fork handlers: the steps that this crate runs around forks, in a fixed order, and a count of forks.

use std::cell::Cell;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use rustix::io::Errno;

use super::failpoint::failpoint;
use super::refused;
use crate::error::Result;

/// A step that runs around forks. After the fork, parent and child run the steps in the order of the variants; before
/// the fork, [`ForkHandlers::prepare`] runs in the reverse order. The order in which steps are installed does not
/// matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Counts the forks ([`generation`]). It comes first, because the functions that the other steps call in a child
    /// must see that they run in a child.
    Generation,
    /// `left_behind`: closes connections in the child. It comes before the arrays, so that the parent releases the lock
    /// of the list of connections before it waits for the copies. Otherwise other threads would have to wait for the
    /// lock.
    Connections,
    /// `shm::forks`: marks the blocks that the child may read. It comes before the arrays, so that the parent stores
    /// the marks in the table and lets the caretaker continue before it waits for the copies.
    Blocks,
    /// `worker::arrays`: the child copies the arrays of a worker while the parent waits. It comes last in both
    /// processes, so its `prepare` runs first: no array is created or freed while the other steps read the states of
    /// the blocks.
    Arrays,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 4] = [Self::Generation, Self::Connections, Self::Blocks, Self::Arrays];
}

/// The functions of a step. A panic ends only the function that panics.
#[derive(Debug)]
pub struct ForkHandlers {
    /// Runs before every fork, in the forking thread.
    pub prepare: fn(),
    /// Runs in the parent after the fork, in the same thread, even if the fork fails.
    pub parent: fn(),
    /// Runs in the child. Must be safe to call in the child of a multi-threaded process.
    pub child: fn(),
}

/// Number of forks between this process and the process that first called [`generation`].
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The handlers of each installed step, indexed by the step's position in [`Step::ALL`].
static INSTALLED: [AtomicPtr<ForkHandlers>; Step::ALL.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; Step::ALL.len()];
/// True if the hooks are registered with the C library.
static HOOKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The steps that take part in the fork in progress on this thread, one bit each: those installed before the fork.
    static RUNNING: Cell<u32> = const { Cell::new(0) };
}

/// Returns a number that is higher in a forked child than in its parent. An object that stores the number can later
/// tell whether it was created before a fork. Costs two atomic loads. `vfork` and a bare `clone` do not change the
/// number.
#[inline]
pub fn generation() -> u64 {
    // SYNC: forks-counted (pairs with the Release in `hook`): if the flag is set, the hooks are registered.
    if !HOOKED.load(Ordering::Acquire) {
        // Callers that depend on the hooks have already called `count_forks`, which reports the error.
        let _ = hook();
    }
    GENERATION.load(Ordering::Relaxed)
}

/// Registers the hooks that count forks for [`generation`].
pub fn count_forks() -> Result<()> {
    // SYNC: forks-counted (pairs with the Release in `hook`).
    if HOOKED.load(Ordering::Acquire) { Ok(()) } else { hook() }
}

/// Installs the handlers of a step and returns true. A second call for the same step changes nothing and returns false.
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
    static COUNTER: ForkHandlers = ForkHandlers { prepare: || (), parent: || (), child: increment_generation };
    install(Step::Generation, &COUNTER);
    // Two concurrent calls register the hooks twice. At a fork, the second run of a hook then finds nothing to do.
    // SAFETY: the hooks are plain functions that exist as long as the process (the library is not unloaded).
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

fn increment_generation() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

fn handlers(step: Step) -> Option<&'static ForkHandlers> {
    // SYNC: forks-handled.
    // SAFETY: the pointer is null or comes from a static reference.
    unsafe { INSTALLED[step as usize].load(Ordering::Acquire).as_ref() }
}

/// Runs one function of each step in `running`. A panic must neither unwind into the C library nor stop the other
/// steps.
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
        // A step that another thread installs from now on takes no part in this fork, because it has prepared nothing.
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
