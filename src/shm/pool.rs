//! A pool of arenas that outlive their iterators: the next epoch finds warm pages.
//!
//! The pool belongs to the process and holds at most [`POOL_ARENAS`] arenas, idle pages up to a sixteenth of the machine's
//! memory and half of the available memory, for at most [`POOL_IDLE`]. It has no thread: it trims at each start and end
//! of an iterator and, while one waits, a few times a second.

use std::sync::atomic::AtomicU64 as Stamp;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::arena::Arena;
use super::layout::{Geometry, Needs};
use crate::config::{POOL_ARENAS, POOL_IDLE, POOL_SHARE};
use crate::sync::Ordering;
use crate::sys;

struct Idle {
    arena: Arc<Arena>,
    /// Bytes of pages in idle blocks.
    bytes: u64,
    since: Duration,
}

static POOL: Mutex<Vec<Idle>> = Mutex::new(Vec::new());
/// The fork generation whose process the pool's contents belong to.
static GENERATION: Stamp = Stamp::new(0);

/// Locks the pool; `None` in a child that was forked while another thread held the lock.
fn pool() -> Option<MutexGuard<'static, Vec<Idle>>> {
    let current = sys::fork::generation();
    // SYNC: pool-emptied (pairs with the Release below).
    if GENERATION.load(Ordering::Acquire) != current {
        // A forked child: the inherited arenas are unusable, and the lock may be held forever.
        let mut inherited = POOL.try_lock().ok()?;
        inherited.drain(..).for_each(|idle| std::mem::forget(idle.arena));
        // SYNC: pool-emptied (pairs with the Acquire above): a thread that sees it finds nothing of the parent.
        GENERATION.store(current, Ordering::Release);
        return Some(inherited);
    }
    Some(POOL.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Takes a pooled or new arena.
pub fn take(needs: Needs) -> crate::error::Result<Arc<Arena>> {
    trim();
    let ring_slots = Geometry::ring_slots_of(needs)?;
    let wanted = (needs.workers, ring_slots, needs.shared_queue);
    let pooled = pool().and_then(|mut pool| {
        let fits = |idle: &Idle| {
            let geometry = idle.arena.geometry();
            (geometry.workers, geometry.ring_slots, geometry.shared_queue) == wanted
        };
        pool.iter().rposition(fits).map(|index| pool.remove(index).arena)
    });
    if let Some(arena) = pooled {
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

/// Returns an arena whose workers have all left cleanly.
pub fn put(arena: Arc<Arena>) {
    super::forks::reap();
    let Some(bytes) = arena.recover() else { return arena.retire() };
    let room = sys::memory::available(&sys::cgroup::Roots::default());
    let most = (sys::memory::total_ram_and_swap() / POOL_SHARE).min(room.bytes / 2);
    let mut dropped = Vec::new();
    if let Some(mut pool) = pool() {
        pool.push(Idle { arena, bytes, since: sys::clock::monotonic() });
        while pool.len() > POOL_ARENAS
            || !pool.is_empty() && pool.iter().map(|idle| idle.bytes).sum::<u64>() > most
        {
            dropped.push(pool.remove(0));
        }
    }
    retire(dropped);
}

/// Retires the arenas that were idle for too long.
pub fn trim() {
    super::forks::reap();
    let now = sys::clock::monotonic();
    let old = pool().map(|mut pool| pool.extract_if(.., |idle| now - idle.since > POOL_IDLE).collect());
    retire(old.unwrap_or_default());
}

/// Retires all arenas in the pool; returns their number.
pub fn clear() -> usize {
    super::forks::reap();
    let all: Vec<Idle> = pool().map(|mut pool| pool.drain(..).collect()).unwrap_or_default();
    let count = all.len();
    retire(all);
    count
}

/// Runs outside the pool's lock: releasing pages takes milliseconds. Leases may keep an arena mapped for longer.
fn retire(idle: Vec<Idle>) {
    idle.into_iter().for_each(|idle| idle.arena.retire());
}
