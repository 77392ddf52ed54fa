//! A pool of arenas that outlive their iterators: the next epoch finds warm pages.
//!
//! The pool belongs to the process. It holds at most [`POOL_ARENAS`] arenas, each for at most [`POOL_IDLE`]: then the
//! [`caretaker`] retires it. The idle pages of all take at most a sixteenth of the machine's memory and half of the
//! available memory.
//!
//! A pooled arena waits for the next epoch of its [`Owner`], the loader that used it last, and is retired when that
//! loader is dropped. But a loader that has not begun may inherit it: a program that makes a loader for each epoch
//! assigns it to the variable of the previous one, which is dropped just before the new one begins. Any loader may take
//! any arena that fits.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64 as Stamp;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::arena::Arena;
use super::caretaker;
use super::layout::{Geometry, Needs};
use crate::config::{POOL_ARENAS, POOL_IDLE, POOL_SHARE};
use crate::sync::{Ordering, lock};
use crate::sys;

struct Idle {
    arena: Arc<Arena>,
    /// Bytes of pages in idle blocks.
    bytes: u64,
    since: Duration,
    /// The number of its owner; 0 without one.
    owner: u64,
}

struct Pool {
    idle: Vec<Idle>,
    /// The live owners. The value is the number of workers of an owner that has not begun, and `None` for the others.
    owners: BTreeMap<u64, Option<u32>>,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { idle: Vec::new(), owners: BTreeMap::new() });
/// The fork generation whose process the pool's contents belong to.
static GENERATION: Stamp = Stamp::new(0);
/// The number of the newest owner.
static OWNERS: Stamp = Stamp::new(0);

/// A loader. Its idle arenas are released when it is dropped.
#[derive(Debug)]
pub struct Owner(u64);

impl Default for Owner {
    fn default() -> Self {
        Self(OWNERS.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

impl Owner {
    /// Announces a loader of `workers` workers, which may inherit arenas until it begins.
    pub fn announce(&self, workers: u32) {
        if let Some(mut pool) = pool() {
            pool.owners.insert(self.0, Some(workers));
        }
    }

    /// Makes this loader the owner of an arena that its iterator has taken.
    pub fn begin(&self, arena: &Arena) {
        // Inserted even if the loader was announced: in a forked child the pool has lost its owners.
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

/// Returns a loader that has not begun and has as many workers as the arena.
fn heir(owners: &BTreeMap<u64, Option<u32>>, arena: &Arena) -> Option<u64> {
    let workers = Some(arena.geometry().workers);
    owners.iter().find_map(|(owner, announced)| (*announced == workers).then_some(*owner))
}

/// Locks the pool; `None` in a child that was forked while another thread held the lock.
fn pool() -> Option<MutexGuard<'static, Pool>> {
    let current = sys::fork::generation();
    // SYNC: pool-emptied (pairs with the Release below).
    if GENERATION.load(Ordering::Acquire) != current {
        // A forked child: the inherited arenas are unusable, and the lock may be held forever.
        let mut inherited = POOL.try_lock().ok()?;
        inherited.idle.drain(..).for_each(|idle| std::mem::forget(idle.arena));
        inherited.owners.clear();
        // SYNC: pool-emptied (pairs with the Acquire above): a thread that sees the new generation finds nothing of the
        // parent's.
        GENERATION.store(current, Ordering::Release);
        return Some(inherited);
    }
    Some(lock(&POOL))
}

/// Returns a pooled or new arena, which has no owner yet.
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
        // Pooled arenas use address space and pages.
        Err(_) if clear() > 0 => Arena::create(needs)?,
        made => made?,
    };
    super::forks::watch(&arena, None)?;
    Ok(arena)
}

/// Puts back an arena whose workers have all left cleanly. Retires it if its owner was dropped and has no heir.
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
    caretaker::start(retire_expired);
}

/// Retires the arenas that have been idle for too long.
pub fn trim() {
    retire_expired();
}

/// Does what [`trim`] does, as the work of the caretaker: returns the time until another arena is idle for too long.
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

/// Retires all arenas in the pool; returns their number.
pub fn clear() -> usize {
    super::forks::reap();
    let all: Vec<Idle> = pool().map(|mut pool| pool.idle.drain(..).collect()).unwrap_or_default();
    let count = all.len();
    retire(all);
    caretaker::stop();
    count
}

/// Retires arenas. Call it without the pool's lock: releasing pages takes milliseconds. Leases may keep an arena mapped
/// for longer.
fn retire(idle: Vec<Idle>) {
    idle.into_iter().for_each(|idle| idle.arena.retire());
}
