//! The connections to workers on other machines.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::shm::arena::Arena;
use crate::sync::lock;
use crate::sys::event::EventFd;
use crate::transport::Link;

/// The current connection of each worker. Each lock is held only while an `Arc` is cloned or replaced.
#[derive(Debug)]
pub(super) struct Links(Box<[Mutex<Option<Arc<Link>>>]>);

impl Links {
    pub(super) fn new(workers: u32) -> Self {
        Self((0..workers).map(|_| Mutex::default()).collect())
    }

    /// Starts the connection to a worker over a connected socket. Replaces the worker's earlier connection.
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

    /// Sends the entries in a worker's submission ring to the worker.
    pub(super) fn ring(&self, worker: u32) {
        if let Some(link) = self.get(worker) {
            link.pump();
        }
    }

    /// Sends a task from the shared queue to a worker that has none or, if every worker has one, to a worker that may
    /// take another.
    pub(super) fn ring_any(&self) {
        let mut chosen = None;
        for link in self.all() {
            match link.outstanding() {
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

    /// Makes the threads of all connections check their rings and the stop flag.
    pub(super) fn wake(&self) {
        self.all().for_each(|link| link.wake());
    }

    /// Receives, in the calling thread, small results that have arrived from a worker.
    pub(super) fn receive_now(&self, worker: u32) {
        if let Some(link) = self.get(worker) {
            link.receive_now();
        }
    }

    /// Makes the connections' threads resume receiving results. Call it before the consumer sleeps.
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
