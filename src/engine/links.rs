//! The connections to workers on other machines.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::shm::arena::Arena;
use crate::sync::lock;
use crate::sys::event::EventFd;
use crate::transport::Link;

/// The current connection of each worker. Each lock is held only while a pointer is copied.
#[derive(Debug)]
pub(super) struct Links(Box<[Mutex<Option<Arc<Link>>>]>);

impl Links {
    pub(super) fn new(workers: u32) -> Self {
        Self((0..workers).map(|_| Mutex::default()).collect())
    }

    /// Opens the connection to a worker.
    pub(super) fn start(
        &self,
        arena: &Arc<Arena>,
        worker: u32,
        socket: OwnedFd,
        bell: &Arc<EventFd>,
    ) -> Result<Arc<Link>> {
        let link = Link::start(arena, worker, socket, bell.clone())?;
        *lock(&self.0[worker as usize]) = Some(link.clone());
        Ok(link)
    }

    /// Sends a worker the entries of its ring.
    pub(super) fn ring(&self, worker: u32) {
        if let Some(link) = self.get(worker) {
            link.pump();
        }
    }

    /// Sends a task of the shared queue to a worker without tasks or, if there is none, to a worker that may take one
    /// more.
    pub(super) fn ring_any(&self) {
        let mut chosen = None;
        for link in self.all() {
            match link.under_way() {
                Some(0) => {
                    chosen = Some(link);
                    break;
                }
                Some(_) => chosen = chosen.or(Some(link)),
                None => {}
            }
        }
        if let Some(link) = chosen {
            link.pump();
        }
    }

    /// Makes all connections check the rings and flags.
    pub(super) fn wake(&self) {
        self.all().for_each(|link| link.wake());
    }

    /// Receives the small results that have arrived from a worker.
    pub(super) fn receive_now(&self, worker: u32) {
        if let Some(link) = self.get(worker) {
            link.receive_now();
        }
    }

    /// Puts the connections' threads on duty, because the consumer is about to sleep.
    pub(super) fn on_duty(&self) {
        self.all().for_each(|link| link.on_duty());
    }

    fn get(&self, worker: u32) -> Option<Arc<Link>> {
        self.0.get(worker as usize).and_then(|slot| lock(slot).clone())
    }

    fn all(&self) -> impl Iterator<Item = Arc<Link>> {
        self.0.iter().filter_map(|slot| lock(slot).clone())
    }
}
