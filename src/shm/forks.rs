//! Protection of blocks that forked children of this process may still read.
//!
//! Each fork marks the blocks that hold live tensors. Marked blocks are neither reused nor punched until every process
//! that descends from the fork has ended or called exec. A mapping that only the children keep ([`ForkWitness`]) shows
//! when that has happened. A child that closes all descriptors it does not know still keeps the mapping. The hooks are
//! registered with pthread_atfork, so that forks in C code run them too.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::arena::{Arena, delivered_blocks};
use super::block::{self, CONSUMER, DELIVERED, FORKED, WORKER, WORKER_FORKED};
use super::caretaker;
use crate::error::Result;
use crate::sync::{Ordering, lock};
use crate::sys::fork::{ForkHandlers, Step, on_fork};
use crate::sys::fork_witness::{ForkWitness, WitnessMapping};

/// A block: the address of its arena, its region and its ID in the region's table.
type Key = (usize, u32, u32);

/// The blocks marked by one fork, or by the forks of one group.
#[derive(Debug)]
struct ForkMarks {
    /// Watches the children. `None` if the system refused to create a witness: the marks then stay forever.
    witness: Option<ForkWitness>,
    marked: HashSet<Key>,
}

/// An arena that this process maps.
#[derive(Debug)]
struct Watched {
    arena: Weak<Arena>,
    /// The region that a worker process owns; `None` in the main process, which holds leases in the regions
    /// of all workers.
    owned: Option<u32>,
}

/// The arenas whose blocks forks mark, and the marks.
#[derive(Debug, Default)]
struct Table {
    arenas: HashMap<usize, Watched>,
    marks: Vec<ForkMarks>,
    /// The number of forks that marked each block. A group counts as one fork.
    counts: HashMap<Key, u32>,
}

/// The table of this process. A forked child starts without a table, because its copy of the lock may be held by a
/// thread that exists only in the parent.
static TABLE: AtomicPtr<Mutex<Table>> = AtomicPtr::new(std::ptr::null_mut());

thread_local! {
    /// The fork, or group of forks, in progress on this thread: the mapping that the children inherit, and the marked
    /// blocks.
    static PENDING: RefCell<Option<(Option<WitnessMapping>, ForkMarks)>> = const { RefCell::new(None) };
    /// The number of open [`begin_group`] calls of this thread. While it is above 0, forks count as one fork.
    static GROUP: RefCell<u32> = const { RefCell::new(0) };
}

fn table() -> MutexGuard<'static, Table> {
    // SYNC: fork-table (both ends): a thread that sees the pointer also sees the table.
    let mut current = TABLE.load(Ordering::Acquire);
    if current.is_null() {
        let fresh = Box::into_raw(Box::<Mutex<Table>>::default());
        match TABLE.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = fresh,
            Err(published) => {
                // SAFETY: `fresh` was not published; no other thread has it.
                drop(unsafe { Box::from_raw(fresh) });
                current = published;
            }
        }
    }
    // SAFETY: a published table is never freed.
    lock(unsafe { &*current })
}

/// Makes every later fork mark the blocks of `arena`. In a worker process, `owned` is the region in which the worker
/// allocates; in the main process it is `None`. Returns an error if the hooks cannot be registered; no block of the
/// arena may then be delivered.
pub fn watch(arena: &Arc<Arena>, owned: Option<u32>) -> Result<()> {
    static HANDLERS: ForkHandlers =
        ForkHandlers { prepare: before_fork, parent: after_fork_in_parent, child: after_fork_in_child };
    on_fork(Step::Blocks, &HANDLERS)?;
    let mut table = table();
    table.arenas.retain(|_, watched| watched.arena.strong_count() > 0);
    let key = Arc::as_ptr(arena) as usize;
    table.arenas.insert(key, Watched { arena: Arc::downgrade(arena), owned });
    Ok(())
}

/// Removes the marks of forks whose children have all ended, and so releases the blocks that no child can read anymore.
pub fn reap() {
    let table = &mut *table();
    let mut index = 0;
    while index < table.marks.len() {
        if !table.marks[index].witness.as_ref().is_some_and(ForkWitness::all_ended) {
            index += 1;
            continue;
        }
        for key in table.marks.swap_remove(index).marked {
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

/// Pauses the caretaker, and makes all forks of this thread until [`end_group`] count as one fork. The start of an
/// iterator's workers is such a group.
pub fn begin_group() {
    caretaker::pause();
    GROUP.with_borrow_mut(|depth| *depth += 1);
}

/// Ends the group that [`begin_group`] started, and lets the caretaker run again.
pub fn end_group() {
    GROUP.with_borrow_mut(|depth| *depth = depth.saturating_sub(1));
    if GROUP.with_borrow(|depth| *depth == 0) {
        finish();
    }
    caretaker::resume();
    caretaker::restart();
}

/// Moves the marks of this thread's forks into the table.
fn finish() {
    if let Some((_mapping, marks)) = PENDING.take() {
        table().marks.push(marks);
    }
}

/// Marks the blocks in use, before a fork.
fn mark(pending: &mut Option<(Option<WitnessMapping>, ForkMarks)>) {
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
                let (_, marks) = pending.get_or_insert_with(|| {
                    let (witness, mapping) = ForkWitness::new().ok().unzip();
                    (mapping, ForkMarks { witness, marked: HashSet::new() })
                });
                let block = (key, region, id as u32);
                if marks.marked.insert(block) {
                    *table.counts.entry(block).or_insert(0) += 1;
                }
            }
        }
    }
}

fn before_fork() {
    if GROUP.with_borrow(|depth| *depth == 0) {
        caretaker::pause();
    }
    reap();
    PENDING.with_borrow_mut(|pending| {
        if delivered_blocks() > 0 || table().arenas.values().any(|watched| watched.owned.is_some()) {
            mark(pending);
        }
    });
}

fn after_fork_in_parent() {
    if GROUP.with_borrow(|depth| *depth == 0) {
        finish();
        // Do not call `restart` here: after this hook has returned, Python warns if the process has several threads.
        caretaker::resume();
    }
}

fn after_fork_in_child() {
    // SYNC: fork-table.
    TABLE.store(std::ptr::null_mut(), Ordering::Release);
    GROUP.with_borrow_mut(|depth| *depth = 0);
    if let Some((mapping, marks)) = PENDING.take() {
        drop(marks.witness);
        // The child keeps the mapping until it ends, and drops everything else.
        std::mem::forget(mapping);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::alloc::Allocator;
    use super::super::lease::Lease;
    use super::*;
    use crate::children::Child;

    /// Forks a child that closes all its descriptors.
    fn start() -> Child {
        Child::fork(|| {
            // SAFETY: the arguments are plain numbers. The child ends without using what it has closed.
            unsafe { libc::close_range(0, u32::MAX, 0) };
            loop {
                // SAFETY: pause has no precondition.
                unsafe { libc::pause() };
            }
        })
    }

    #[test]
    fn a_block_stays_until_the_children_of_each_fork_that_saw_it_have_ended() {
        let arena = Arena::create_sized(1 << 30, 1, 8).unwrap();
        watch(&arena, None).unwrap();
        let mut allocator = Allocator::new(arena.clone(), 0);
        let id = allocator.allocate(20_000, CONSUMER).unwrap();
        let forked = || {
            reap();
            arena.table(0)[id as usize].state.load(Ordering::Relaxed) & FORKED != 0
        };
        let lease = Lease::new(&arena, 0, id, 20_000).unwrap();
        let first = start();
        begin_group();
        let (second, third) = (start(), start());
        end_group();
        drop(lease);
        let late = start();
        // Give the children time to close their descriptors.
        for _ in 0..50 {
            assert!(forked());
            std::thread::sleep(Duration::from_millis(1));
        }
        first.kill();
        assert!(forked());
        second.kill();
        assert!(forked(), "one child of the group still lives");
        assert_ne!(allocator.allocate(20_000, CONSUMER).unwrap(), id);
        third.kill();
        // Children that other tests fork at the same time also map the witness for a moment.
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while forked() {
            assert!(std::time::Instant::now() < end, "a process keeps the witness mapped");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(allocator.allocate(20_000, CONSUMER).unwrap(), id, "the last child never saw the lease");
        late.kill();
    }
}
