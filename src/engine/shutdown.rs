//! Shutdown of an engine and its arena.

use std::sync::Arc;

use super::completions::{self, Arrival, Completions};
use super::core::Engine;
use super::{page, pin};
use crate::scheduler::Event;
use crate::shm::arena::Arena;
use crate::shm::pool;
use crate::sync::Ordering;

/// The action to take on an arena after its iterator has ended.
#[derive(Debug)]
pub enum Ending {
    /// Do nothing, because an earlier call has handled the arena, or it belongs to the parent process.
    Nothing,
    /// Put the arena into the pool for later iterators.
    Pool(Arc<Arena>),
    /// Release the arena's pages. It must not be used again.
    Retire(Arc<Arena>),
}

impl Ending {
    /// Puts the arena into the pool or releases its pages. Call it without the GIL, because this may take a long time.
    pub fn carry_out(self) {
        match self {
            Self::Nothing => {}
            Self::Pool(arena) => pool::put(arena),
            Self::Retire(arena) => arena.retire(),
        }
    }
}

impl<T, B: Send + 'static, E> Engine<T, B, E> {
    /// Ends the engine and discards undelivered results. Call it after the workers have ended. Then call
    /// [`Ending::carry_out`], which does the remaining, slow work.
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
        // While the pin thread runs, it owns the consumer's ends of the rings.
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
        // If there was a pin thread, it has dropped its ends of the rings, so new ones can be made.
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
        match self.event(Event::Shutdown).and_then(|()| self.perform_actions()) {
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
            // Ask the workers to exit, as `Handle::stop_workers` does, but without waking them.
            self.handle.arena.header().stop.0.store(1, Ordering::Relaxed);
            page::close(&self.handle.arena);
            self.arena().retire();
        }
    }
}
