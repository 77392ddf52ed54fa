//! Shutdown of an engine and its arena.

use std::sync::Arc;

use super::completions::{self, Arrival, Completions};
use super::core::Engine;
use super::{page, pin};
use crate::scheduler::Event;
use crate::shm::arena::Arena;
use crate::shm::pool;
use crate::sync::Ordering;

/// The treatment of an arena after its iterator has ended.
#[derive(Debug)]
pub enum Ending {
    /// Do nothing: the arena has been dealt with.
    Nothing,
    /// Put it into the pool: the next iterator may use it.
    Pool(Arc<Arena>),
    /// Release its pages: it must not be used again.
    Retire(Arc<Arena>),
}

impl Ending {
    /// Puts the arena into the pool or releases its pages. Call it without the GIL.
    pub fn carry_out(self) {
        match self {
            Self::Nothing => {}
            Self::Pool(arena) => pool::put(arena),
            Self::Retire(arena) => arena.retire(),
        }
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Ends the engine after its workers have ended, and discards undelivered results. [`Ending::carry_out`] does the
    /// remaining, slow work.
    pub fn finish(&mut self) -> Ending {
        if std::mem::replace(&mut self.finished, true) || !self.handle.is_ours() {
            return Ending::Nothing;
        }
        self.times.end();
        self.handle.answers().drop_snapshots();
        self.handle.detach_from_arena();
        let arena = self.arena().clone();
        if self.delivery.is_broken() || !self.handle.all_left() {
            return Ending::Retire(arena);
        }
        if let Some(Arrival { incoming, ready: None }) = self.delivery.untie(None) {
            completions::discard(&arena, &incoming);
        }
        // The thread owns the consumer's ends of the rings while it runs.
        if self.handle.pinning().is_some_and(pin::PinControl::is_alive) {
            return Ending::Retire(arena);
        }
        if let Some(link) = self.inbox.link() {
            while let Ok(event) = link.events.try_recv() {
                if let pin::PinEvent::Result(incoming, None) = event {
                    completions::discard(&arena, &incoming);
                }
            }
        }
        // A pin thread has dropped its ends of the rings.
        let mut rings = Completions::new(&arena);
        for worker in 0..arena.geometry().workers {
            loop {
                match rings.pop(worker) {
                    Ok(Some(incoming)) => completions::discard(&arena, &incoming),
                    Ok(None) => break,
                    Err(_) => return Ending::Retire(arena),
                }
            }
        }
        match self.event(Event::Shutdown).and_then(|()| self.effects()) {
            Ok(()) => Ending::Pool(arena),
            Err(_) => Ending::Retire(arena),
        }
    }
}

impl<T, B: Send + 'static, E> Drop for Engine<T, B, E> {
    fn drop(&mut self) {
        if !self.handle.is_ours() {
            self.inbox.forget_source();
            return;
        }
        self.handle.stop_pinning();
        if !self.finished {
            self.handle.answers().drop_snapshots();
            // Like `Handle::stop_workers`: asks the workers to leave.
            self.handle.arena.header().stop.0.store(1, Ordering::Relaxed);
            page::close(&self.handle.arena);
            self.arena().retire();
        }
    }
}
