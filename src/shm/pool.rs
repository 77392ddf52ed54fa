//! A pool of arenas that outlive their iterators, so that the next epoch finds warm pages.
//!
//! Each process has one pool. It holds at most [`POOL_ARENAS`] arenas, each for at most [`POOL_IDLE`]; after that time
//! the [`caretaker`] retires the arena. Together, the idle pages of all pooled arenas take at most a sixteenth of the
//! machine's RAM and swap, and at most half of the available memory.
//!
//! A pooled arena waits for the next epoch of its [`Owner`], the loader that used it last, and is retired when that
//! loader is dropped. There is one exception: a loader that exists but has not started its first epoch inherits the
//! arena if it has the same number of workers. The exception serves programs that create a loader for each epoch and
//! assign it to the same variable: the previous loader is dropped just before the new one starts. Any loader may take
//! any pooled arena that fits, whatever its owner.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::arena::Arena;
use super::caretaker::{self, Duty};
use super::layout::{Geometry, Needs};
use crate::config::{POOL_ARENAS, POOL_IDLE, POOL_SHARE};
use crate::sync::{Ordering, lock};
use crate::sys;

/// An arena in the pool.
struct Idle {
    arena: Arc<Arena>,
    /// Number of bytes with pages in idle blocks.
    bytes: u64,
    /// The time at which the arena was put into the pool.
    since: Duration,
    /// The ID of the owner; 0 if there is none.
    owner: u64,
}

struct Pool {
    idle: Vec<Idle>,
    /// The live owners, by ID. The value is the number of workers of an owner that has not started its first epoch, and
    /// `None` for all others.
    owners: BTreeMap<u64, Option<u32>>,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { idle: Vec::new(), owners: BTreeMap::new() });
/// The fork generation of the process to which the pool's contents belong.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The ID of the newest owner.
static LAST_OWNER: AtomicU64 = AtomicU64::new(0);

/// A loader, as the owner of arenas. When it is dropped, its pooled arenas are retired or pass to an heir.
#[derive(Debug)]
pub struct Owner(u64);

impl Default for Owner {
    fn default() -> Self {
        Self(LAST_OWNER.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

impl Owner {
    /// Announces this loader, which has `workers` workers. Until its first epoch starts, it may inherit arenas.
    pub fn announce(&self, workers: u32) {
        if let Some(mut pool) = pool() {
            pool.owners.insert(self.0, Some(workers));
        }
    }

    /// Makes this loader the owner of an arena that its iterator has taken.
    pub fn begin(&self, arena: &Arena) {
        // Insert, rather than update the announced entry: in a forked child, the pool has lost its owners.
        if let Some(mut pool) = pool() {
            pool.owners.insert(self.0, None);
        }
        arena.owner.store(self.0, Ordering::Relaxed);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(mut pool) = pool() else { return };
        pool.owners.remove(&self.0);
        let (owners, mut gone) = (std::mem::take(&mut pool.owners), Vec::new());
        for mut idle in std::mem::take(&mut pool.idle) {
            if idle.owner == self.0 {
                idle.owner = heir(&owners, &idle.arena).unwrap_or(0);
            }
            if idle.owner == 0 { gone.push(idle) } else { pool.idle.push(idle) }
        }
        pool.owners = owners;
        drop(pool);
        if !gone.is_empty() {
            super::forks::reap();
            retire(gone);
            caretaker::wake();
        }
    }
}

/// Returns the ID of a loader that is announced, has not started its first epoch, and has the arena's number of
/// workers.
fn heir(owners: &BTreeMap<u64, Option<u32>>, arena: &Arena) -> Option<u64> {
    let workers = Some(arena.geometry().workers);
    owners.iter().find_map(|(owner, announced)| (*announced == workers).then_some(*owner))
}

/// Locks the pool. Returns `None` in a child that was forked while another thread held the lock.
fn pool() -> Option<MutexGuard<'static, Pool>> {
    let current = sys::fork::generation();
    // SYNC: pool-emptied (pairs with the Release below).
    if GENERATION.load(Ordering::Acquire) != current {
        // A forked child: the inherited arenas are unusable, and the lock may be held forever.
        let mut inherited = POOL.try_lock().ok()?;
        inherited.idle.drain(..).for_each(|idle| std::mem::forget(idle.arena));
        inherited.owners.clear();
        // SYNC: pool-emptied (pairs with the Acquire above): a thread that sees the new generation finds none of the
        // parent's entries.
        GENERATION.store(current, Ordering::Release);
        return Some(inherited);
    }
    Some(lock(&POOL))
}

/// Returns an arena that meets `needs`, from the pool if possible, otherwise a new one. It has no owner yet.
pub fn take(needs: Needs) -> crate::error::Result<Arc<Arena>> {
    trim();
    let ring_slots = Geometry::ring_slots_of(needs)?;
    let wanted = (needs.workers, ring_slots, needs.shared_queue);
    let pooled = pool().and_then(|mut pool| {
        let fits = |idle: &Idle| {
            let geometry = idle.arena.geometry();
            (geometry.workers, geometry.ring_slots, geometry.shared_queue) == wanted
        };
        pool.idle.iter().rposition(fits).map(|index| pool.idle.remove(index).arena)
    });
    if let Some(arena) = pooled {
        caretaker::wake();
        arena.owner.store(0, Ordering::Relaxed);
        arena.reset_control();
        return Ok(arena);
    }
    let arena = match Arena::create(needs) {
        // Pooled arenas take address space and pages that the new arena may need.
        Err(_) if clear() > 0 => Arena::create(needs)?,
        made => made?,
    };
    super::forks::watch(&arena, None)?;
    Ok(arena)
}

/// Puts back an arena whose workers have all left cleanly. Retires the arena instead if it cannot be reused, or if its
/// owner was dropped and has no heir. If the pool is too large, retires its oldest arenas.
pub fn put(arena: Arc<Arena>) {
    super::forks::reap();
    let Some(bytes) = arena.recover() else { return arena.retire() };
    let room = sys::memory::available(&sys::cgroup::Roots::default());
    let max_bytes = (sys::memory::total_ram_and_swap() / POOL_SHARE).min(room.bytes / 2);
    let mut dropped = Vec::new();
    if let Some(mut pool) = pool() {
        let mut owner = arena.owner.load(Ordering::Relaxed);
        if owner != 0 && !pool.owners.contains_key(&owner) {
            owner = heir(&pool.owners, &arena).unwrap_or(0);
            if owner == 0 {
                drop(pool);
                return arena.retire();
            }
        }
        pool.idle.push(Idle { arena, bytes, since: sys::clock::monotonic(), owner });
        while pool.idle.len() > POOL_ARENAS
            || !pool.idle.is_empty() && pool.idle.iter().map(|idle| idle.bytes).sum::<u64>() > max_bytes
        {
            dropped.push(pool.idle.remove(0));
        }
    }
    retire(dropped);
    caretaker::start(Duty::Pages, Arc::new(retire_expired));
}

/// Retires the arenas that have been idle for [`POOL_IDLE`].
pub fn trim() {
    retire_expired();
}

/// Retires the arenas that have been idle for [`POOL_IDLE`]. Returns the time until the next arena expires, or `None`
/// if none is left. The caretaker calls this function.
fn retire_expired() -> Option<Duration> {
    super::forks::reap();
    let now = sys::clock::monotonic();
    let mut pool = pool()?;
    let old = pool.idle.extract_if(.., |idle| now - idle.since >= POOL_IDLE).collect();
    let next = pool.idle.iter().map(|idle| idle.since + POOL_IDLE - now).min();
    drop(pool);
    retire(old);
    next
}

/// Retires all arenas in the pool, and returns their count.
pub fn clear() -> usize {
    super::forks::reap();
    let all: Vec<Idle> = pool().map(|mut pool| pool.idle.drain(..).collect()).unwrap_or_default();
    let count = all.len();
    retire(all);
    caretaker::stop(Duty::Pages);
    count
}

/// Retires arenas. Call it without holding the pool's lock, because releasing pages takes milliseconds. Leases may keep
/// a retired arena mapped.
fn retire(idle: Vec<Idle>) {
    idle.into_iter().for_each(|idle| idle.arena.retire());
}
