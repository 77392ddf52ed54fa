//! Children of this process that may still look at a block.
//!
//! Before each fork the blocks that live tensors lie in are marked; they are neither reused nor punched until every
//! process that came of that fork has ended or called exec. That end is seen by a close-on-exec pipe made before the fork, whose
//! writing end only the children keep. The hooks are pthread_atfork's, so they also see forks made by C code.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Mutex, MutexGuard, Once, Weak};

use super::arena::{Arena, delivered_blocks};
use super::block::{self, CONSUMER, DELIVERED, FORKED, WORKER, WORKER_FORKED};
use crate::sync::Ordering;
use crate::sys;

/// A block of an arena: the arena's number in this table, region, block.
type Key = (usize, u32, u32);

/// What one fork (or the forks of one group) left marked.
#[derive(Debug)]
struct Generation {
    /// Reports the end of the last child; `None` where no pipe could be had: then the marks stay for ever.
    ended: Option<OwnedFd>,
    marked: HashSet<Key>,
}

/// An arena that this process looks at.
#[derive(Debug)]
struct Watched {
    arena: Weak<Arena>,
    /// The region that this process owns as a worker; `None` in the main process, which holds leases in all.
    owned: Option<u32>,
}

#[derive(Debug, Default)]
struct Table {
    arenas: HashMap<usize, Watched>,
    generations: Vec<Generation>,
    /// How many generations have marked a block.
    counts: HashMap<Key, u32>,
}

/// The table of this process. A child starts with none: a lock that another thread held at the fork stays locked in the child.
static TABLE: AtomicPtr<Mutex<Table>> = AtomicPtr::new(std::ptr::null_mut());
static HOOKS: Once = Once::new();

thread_local! {
    /// The forks that this thread makes now: the pipe's writing end, and what is marked.
    static PENDING: RefCell<Option<(Option<OwnedFd>, Generation)>> = const { RefCell::new(None) };
    /// More than 0 while the workers of one iterator are started: all of them share one pipe.
    static GROUP: RefCell<u32> = const { RefCell::new(0) };
}

fn table() -> MutexGuard<'static, Table> {
    let mut current = TABLE.load(Ordering::Acquire);
    if current.is_null() {
        let fresh = Box::into_raw(Box::<Mutex<Table>>::default());
        match TABLE.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = fresh,
            Err(theirs) => {
                // SAFETY: `fresh` was not published; nobody else has it.
                drop(unsafe { Box::from_raw(fresh) });
                current = theirs;
            }
        }
    }
    // SAFETY: a published table is never freed.
    unsafe { &*current }.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Marks the blocks of `arena` at every fork from now on. `owned` is the region that this process allocates in, if it
/// is a worker.
pub fn watch(arena: &Arc<Arena>, owned: Option<u32>) {
    HOOKS.call_once(|| {
        // Refused only without memory: then a forked child sees what is delivered later, as with plain shared memory.
        let _ = sys::fork::on_fork(before_fork, after_fork_in_parent, after_fork_in_child);
    });
    let mut table = table();
    table.arenas.retain(|_, watched| watched.arena.strong_count() > 0);
    let key = Arc::as_ptr(arena) as usize;
    table.arenas.insert(key, Watched { arena: Arc::downgrade(arena), owned });
}

/// Lets go of the blocks that only ended children had seen.
pub fn reap() {
    let table = &mut *table();
    let mut index = 0;
    while index < table.generations.len() {
        let ended = table.generations[index].ended.as_ref();
        if !ended.is_some_and(|pipe| sys::fork::reads_eof(pipe.as_fd())) {
            index += 1;
            continue;
        }
        for key in table.generations.swap_remove(index).marked {
            let count = table.counts.entry(key).or_insert(1);
            *count -= 1;
            if *count > 0 {
                continue;
            }
            table.counts.remove(&key);
            let Some(watched) = table.arenas.get(&key.0) else { continue };
            if let Some(arena) = watched.arena.upgrade() {
                let bit = if watched.owned.is_some() { WORKER_FORKED } else { FORKED };
                arena.release(key.1, key.2, bit);
            }
        }
    }
}

/// From here to [`end_group`] the forks of this thread share one pipe: the workers of one iterator.
pub fn begin_group() {
    GROUP.with_borrow_mut(|depth| *depth += 1);
}

/// Ends what [`begin_group`] began.
pub fn end_group() {
    GROUP.with_borrow_mut(|depth| *depth = depth.saturating_sub(1));
    if GROUP.with_borrow(|depth| *depth == 0) {
        finish();
    }
}

/// Files what this thread's forks have marked.
fn finish() {
    if let Some((_writer, generation)) = PENDING.take() {
        table().generations.push(generation);
    }
}

/// Marks what is leased now, for the fork that follows.
fn mark(pending: &mut Option<(Option<OwnedFd>, Generation)>) {
    let table = &mut *table();
    for (&key, watched) in &table.arenas {
        let Some(arena) = watched.arena.upgrade().filter(|arena| arena.is_ours()) else { continue };
        let (regions, holder, bit) = match watched.owned {
            None => (0..arena.geometry().main_region(), CONSUMER | DELIVERED, FORKED),
            Some(region) => (region..region + 1, WORKER, WORKER_FORKED),
        };
        for region in regions {
            let count = arena.block_count(region);
            for (id, entry) in arena.table(region)[..count as usize].iter().enumerate() {
                if !block::mark_if(&entry.state, holder, bit) {
                    continue;
                }
                let (_, generation) = pending.get_or_insert_with(|| {
                    let (ended, writer) = sys::fork::pipe_cloexec().ok().unzip();
                    (writer, Generation { ended, marked: HashSet::new() })
                });
                let block = (key, region, id as u32);
                if generation.marked.insert(block) {
                    *table.counts.entry(block).or_insert(0) += 1;
                }
            }
        }
    }
}

extern "C" fn before_fork() {
    // A panic must not cross into the C library.
    let _ = std::panic::catch_unwind(|| {
        reap();
        PENDING.with_borrow_mut(|pending| {
            if delivered_blocks() > 0 || table().arenas.values().any(|watched| watched.owned.is_some()) {
                mark(pending);
            }
        });
    });
}

extern "C" fn after_fork_in_parent() {
    let _ = std::panic::catch_unwind(|| {
        if GROUP.with_borrow(|depth| *depth == 0) {
            finish();
        }
    });
}

extern "C" fn after_fork_in_child() {
    // The writing end stays open until this process ends; of everything else the child keeps nothing.
    let _ = std::panic::catch_unwind(|| {
        TABLE.store(std::ptr::null_mut(), Ordering::Release);
        GROUP.with_borrow_mut(|depth| *depth = 0);
        if let Some((writer, generation)) = PENDING.take() {
            drop(generation.ended);
            std::mem::forget(writer);
        }
    });
}
