//! Snapshots of workers: which ones the engine keeps and for how long, and that results are unaffected.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rustloader::config::BACK_BATCHES;
use rustloader::engine::completions::Message;
use rustloader::engine::pin::{Body, Prepare};
use rustloader::engine::{Ending, Incoming};
use rustloader::error::Error;
use rustloader::metrics::{Count, WorkerTotals};
use rustloader::scheduler::{Dispatch, Settings};
use rustloader::shm::arena::Arena;
use rustloader::shm::block::CONSUMER;
use rustloader::shm::ring::Producer;
use rustloader::wire::{Load, ResultEntry, ResultKind, Timings};

use super::rig::{LIMIT, Loader, Rig, held, until};

/// Counts the batches that it prepares.
struct Counting(Arc<AtomicUsize>);

impl Prepare for Counting {
    type Ready = Vec<u8>;

    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> Result<Vec<u8>, String> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let message = Message::open(arena, incoming, Vec::new()).map_err(|error| error.to_string())?;
        Ok(message.payload().to_vec())
    }

    fn is_error(_: &Self::Ready) -> bool {
        false
    }
}

fn rig(settings: Settings) -> Rig {
    Rig::over(Loader::new(settings, true).unwrap(), 8)
}

/// Returns a rig of persistent workers with two tasks each.
fn persistent(workers: usize) -> Rig {
    rig(Settings { persistent: true, ..Settings::torch(workers, 2, true) })
}

impl Rig {
    fn snapshot(&self, worker: usize, count: u64, payload: &[u8]) {
        assert!(self.ports[worker].send_snapshot(count, payload, false).unwrap());
    }

    /// Returns (answers, is_error, payload) of the engine's snapshot for this many answers.
    fn kept(&self, worker: u32, answers: u64) -> Option<(u64, bool, Vec<u8>)> {
        let snapshot = self.engine.handle().snapshot(worker, answers).unwrap()?;
        Some((snapshot.answers, snapshot.is_error, snapshot.payload))
    }

    fn count(&self, worker: u32, answers: u64) -> Option<u64> {
        self.kept(worker, answers).map(|(count, ..)| count)
    }

    /// Processes all results that have arrived, and opens tied ones.
    fn process_outside_next(&mut self) {
        while let Some((incoming, _)) = self.engine.process_outside_next().unwrap() {
            let payload = self.payload_of(&incoming);
            self.engine.opened(payload).unwrap();
        }
    }

    /// Takes the message that begins an epoch, and answers it.
    fn resume(&self, worker: usize) {
        assert_eq!(self.take(worker).task, 0, "the message has no task");
        self.ports[worker].answer(0, ResultKind::Resumed).unwrap();
    }
}

#[test]
fn a_snapshot_comes_before_its_result_and_is_no_result() {
    let mut rig = rig(Settings::torch(2, 2, true));
    rig.snapshot(0, 0, b"first");
    rig.answer(0, ResultKind::Plain);
    let done = |rig: &Rig| {
        let sent = WorkerTotals::of(&rig.arena.control(0).status, (1, false), 0).tasks;
        (sent, rig.engine.handle().status(0).unwrap().unwrap().tasks_done)
    };
    assert_eq!(done(&rig), (1, 1));
    assert_eq!(rig.kept(0, 9), None, "nothing has been processed yet");
    assert_eq!(rig.batch(), 0);
    assert_eq!(rig.kept(0, 9), Some((0, false, b"first".to_vec())));
    assert_eq!(rig.kept(1, 9), None);
    // The state after the second answer is sent before that answer.
    rig.snapshot(0, 2, b"second");
    rig.answer(0, ResultKind::Error);
    rig.answer(1, ResultKind::Plain);
    let before = rig.engine.progress();
    rig.process_outside_next();
    assert_eq!(rig.engine.progress().outstanding, before.outstanding - 2);
    assert_eq!((rig.batch(), rig.batch()), (1, 2));
    assert_eq!(rig.kept(0, 1), Some((0, false, b"first".to_vec())));
    assert_eq!(rig.kept(0, 2), Some((2, false, b"second".to_vec())));
    assert_eq!(done(&rig), (2, 2));
    assert!(rig.ports[0].send_snapshot(2, b"why not", true).unwrap());
    rig.process_outside_next();
    assert_eq!(rig.kept(0, 2), Some((2, true, b"why not".to_vec())));
    assert_eq!(rig.kept(7, 2), None);
}

#[test]
fn every_position_that_can_be_asked_for_has_its_snapshot_and_no_older_one_is_kept() {
    for in_order in [true, false] {
        let mut rig = rig(Settings::torch(2, 2, in_order));
        (0..2).for_each(|worker| rig.snapshot(worker, 0, b"first"));
        for answers in 1..=60u64 {
            let worker = (answers - 1) as usize % 2;
            let count = answers.div_ceil(2);
            rig.snapshot(worker, count, &count.to_le_bytes());
            rig.answer(worker, ResultKind::Plain);
            rig.batch();
            for missing in 0..=1 {
                for back in 0..=BACK_BATCHES {
                    let state = rig.engine.handle().answers();
                    let Ok(position) = state.positions.at(answers - missing, back) else { continue };
                    drop(state);
                    for (worker, count) in (0..).zip(position.per_worker) {
                        let (found, is_error, payload) = rig.kept(worker, count).unwrap();
                        assert_eq!((found, is_error), (count, false));
                        assert_eq!(payload, if count == 0 { b"first".to_vec() } else { count.to_le_bytes().into() });
                    }
                }
            }
            // A snapshot for each answer that a position may go back, one before them for each worker, one in
            // progress, and one that is released with its worker's next.
            assert!(held(&rig.arena) <= BACK_BATCHES + 1 + 2 + 2, "{} are held", held(&rig.arena));
        }
    }
}

#[test]
fn a_new_epoch_releases_the_snapshots_and_drops_those_of_the_old_one() {
    let mut rig = persistent(2);
    for worker in 0..2 {
        rig.snapshot(worker, 0, b"old");
    }
    rig.answer(0, ResultKind::Plain);
    rig.batch();
    assert_eq!(held(&rig.arena), 2);
    assert!(!rig.engine.is_starting());
    rig.engine.reset(b"").unwrap();
    assert_eq!((held(&rig.arena), rig.kept(0, 9)), (0, None));
    // This snapshot and this answer still belong to the old epoch.
    rig.snapshot(0, 2, b"old");
    rig.answer(0, ResultKind::Plain);
    rig.process_outside_next();
    assert_eq!((held(&rig.arena), rig.kept(0, 9)), (0, None));
    assert!(rig.engine.is_starting());
    rig.answer(0, ResultKind::Plain);
    rig.resume(0);
    rig.snapshot(0, 0, b"new");
    rig.process_outside_next();
    assert_eq!(rig.kept(0, 9), Some((0, false, b"new".to_vec())));
    assert!(rig.engine.is_starting(), "worker 1 has not resumed");
    (0..2).for_each(|_| _ = rig.answer(1, ResultKind::Plain));
    rig.resume(1);
    rig.process_outside_next();
    assert!(rig.engine.is_starting() && !rig.engine.resuming());
    rig.snapshot(1, 0, b"new");
    rig.process_outside_next();
    assert!(!rig.engine.is_starting());
}

#[test]
fn the_end_releases_the_snapshots_before_another_iterator_gets_the_arena() {
    let mut rig = persistent(2);
    rig.snapshot(0, 0, b"taken in");
    rig.answer(0, ResultKind::Plain);
    rig.batch();
    rig.snapshot(1, 0, b"in the ring");
    for worker in 0..2 {
        rig.ports[worker].leave();
        rig.kill(worker);
    }
    assert_eq!(held(&rig.arena), 2);
    let Ending::Pool(arena) = rig.engine.finish() else { panic!("the end is not clean") };
    assert!(rig.engine.process_outside_next().unwrap().is_none());
    assert_eq!((held(&arena), rig.kept(0, 9)), (0, None));
    let position = rig.engine.handle().answers().positions.at(1, 0).unwrap();
    assert_eq!((position.low, position.per_worker), (1, vec![1, 0]), "outstanding tasks are not delivered");
    assert!(!rig.engine.is_starting());
}

#[test]
fn an_engine_that_is_dropped_releases_the_snapshots() {
    let mut rig = persistent(1);
    rig.snapshot(0, 0, b"state");
    rig.process_outside_next();
    assert_eq!(held(&rig.arena), 1);
    let handle = rig.engine.handle().clone();
    rig.engine = Loader::new(Settings::torch(1, 1, true), true).unwrap();
    assert_eq!((held(&rig.arena), handle.snapshot(0, 9).unwrap()), (0, None));
}

#[test]
fn snapshots_survive_their_worker_and_a_death_ends_the_wait_for_the_first_one() {
    let mut rig = rig(Settings::torch(2, 2, true));
    assert!(rig.engine.is_starting());
    rig.snapshot(0, 0, b"state");
    rig.process_outside_next();
    assert!(rig.engine.is_starting());
    rig.snapshot(0, 1, b"published before the death");
    rig.kill(0);
    rig.kill(1);
    let start = Instant::now();
    while rig.engine.is_starting() {
        assert!(start.elapsed() < LIMIT, "the death is not seen");
        rig.wait(None);
        rig.process_outside_next();
    }
    assert_eq!((rig.count(0, 0), rig.count(0, 1), rig.count(1, 9)), (Some(0), Some(1), None));
    rig.engine.finish().carry_out();
    assert_eq!(rig.count(0, 1), None);
}

#[test]
fn nothing_is_awaited_of_an_iterator_that_is_closed_or_has_no_snapshots() {
    let mut rig = rig(Settings::torch(1, 2, true));
    rig.snapshot(0, 0, b"state");
    rig.engine.handle().close();
    assert!(!rig.engine.is_starting());
    assert!(rig.engine.process_outside_next().unwrap().is_none());
    assert_eq!(rig.kept(0, 0), None, "a closed iterator processes nothing");
    let plain = Loader::new(Settings::torch(1, 2, true), false).unwrap();
    assert!(!plain.is_starting());
}

#[test]
fn a_tied_result_does_not_hide_the_first_snapshot_behind_it() {
    let mut rig = rig(Settings::torch(2, 2, true));
    rig.snapshot(0, 0, b"state");
    rig.answer(0, ResultKind::Tied);
    rig.answer(0, ResultKind::Tied);
    rig.snapshot(1, 0, b"state");
    assert!(rig.engine.process_outside_next().unwrap().is_some());
    assert!(rig.engine.is_starting());
    rig.process_outside_next();
    assert!(!rig.engine.is_starting());
    assert_eq!(rig.batch(), 0);
}

#[test]
fn the_first_snapshot_rings_the_doorbell_and_the_others_wait_for_their_results() {
    let rig = rig(Settings::torch(1, 2, true));
    rig.arena.header().doorbell.0.announce();
    rig.snapshot(0, 1, b"state");
    assert!(!rig.has_rung());
    rig.snapshot(0, 0, b"state");
    assert!(rig.has_rung());
}

#[test]
fn the_ring_has_room_for_all_snapshots_while_nobody_takes_them() {
    for (workers, prefetch_factor) in [(1, 1), (1, 4), (2, 6), (3, 4)] {
        let torchs = Settings::torch(workers, prefetch_factor, true);
        for settings in [
            Settings { persistent: true, ..torchs.clone() },
            Settings { persistent: true, dispatch: Dispatch::SharedQueue, ..torchs },
        ] {
            // With a shared queue, one worker may claim all tasks.
            let tasks = if settings.dispatch == Dispatch::SharedQueue { workers } else { 1 } * prefetch_factor;
            let mut rig = rig(settings);
            rig.snapshot(0, 0, b"first");
            for count in 1..=tasks as u64 {
                rig.snapshot(0, count, b"state");
                rig.answer(0, ResultKind::Plain);
            }
            assert!(rig.ports[0].send_snapshot(tasks as u64, b"an error", true).unwrap());
            rig.snapshot(0, tasks as u64, b"the end");
            rig.engine.reset(b"").unwrap();
            rig.resume(0);
            rig.snapshot(0, 0, b"first");
            rig.process_outside_next();
            assert_eq!(rig.count(0, 99), Some(0));
        }
    }
}

#[test]
fn a_pin_thread_passes_snapshots_on_and_prepares_the_batches_alone() {
    let mut rig = rig(Settings::torch(1, 16, true));
    let prepared = Arc::new(AtomicUsize::new(0));
    rig.engine.start_pinning(Counting(prepared.clone()), Body::run).unwrap();
    rig.snapshot(0, 0, b"first");
    for count in 1..=16 {
        rig.snapshot(0, count, b"state");
        rig.answer(0, ResultKind::Plain);
    }
    // The thread processes all of them, although `next` takes nothing.
    until(|| prepared.load(Ordering::SeqCst) == 16);
    until(|| rig.arena.control(0).results.head.0.load(Ordering::SeqCst) == 33);
    assert_eq!(rig.kept(0, 99), None);
    assert!(rig.engine.is_starting());
    for number in 0..16 {
        assert_eq!(rig.batch(), number);
        assert_eq!(rig.count(0, number + 1), Some(number + 1));
    }
    assert!(!rig.engine.is_starting());
    assert_eq!(rig.engine.handle().meter.get(Count::Pinned), 16);
    rig.engine.handle().stop_pinning();
    until(|| rig.engine.handle().pinning().unwrap().join(LIMIT));
}

/// Publishes an entry without the port.
fn forge(rig: &Rig, entry: &ResultEntry) {
    Producer::new(rig.arena.result_ring(0)).push(&entry.to_words()).unwrap();
    rustloader::shm::doorbell::mark(rig.arena.bitmap(), 0);
}

fn is_damaged<R>(result: Result<R, Error>) -> bool {
    matches!(result, Err(Error::Corrupt { .. }))
}

#[test]
fn what_a_broken_worker_wrote_is_an_error_and_leads_nowhere() {
    let mut rig = rig(Settings::torch(2, 2, false));
    rig.snapshot(0, 0, b"state");
    rig.process_outside_next();
    // Flips each bit of the payload and of the head before it.
    let block = (0..rig.arena.block_count(0))
        .find(|id| rig.arena.table(0)[*id as usize].state.load(Ordering::SeqCst) & CONSUMER != 0);
    let block = block.unwrap();
    let memory = rig.arena.block_memory(0, block, 13).unwrap().as_ptr();
    for bit in 0..13 * 8 {
        // SAFETY: the block has at least 13 bytes, and only this test uses it.
        let flip = || unsafe { *memory.add(bit / 8) ^= 1 << (bit % 8) };
        flip();
        assert!(is_damaged(rig.engine.handle().snapshot(0, 0)), "bit {bit}");
        flip();
    }
    assert_eq!(rig.count(0, 0), Some(0));
    let sound = ResultEntry {
        task: 1,
        kind: ResultKind::Snapshot,
        block: Some(block),
        len: 13,
        checksum: rustloader::wire::checksum(b"state"),
        timings: Timings::default(),
        load: Load::default(),
    };
    for entry in [
        ResultEntry { len: u64::MAX, ..sound },
        ResultEntry { len: 7, ..sound },
        ResultEntry { block: Some(9_999_999), ..sound },
        ResultEntry { checksum: 0, ..sound },
        ResultEntry { task: u64::MAX, len: 12, ..sound },
    ] {
        forge(&rig, &entry);
        rig.process_outside_next();
        assert!(is_damaged(rig.engine.handle().snapshot(0, u64::MAX)), "{entry:?}");
    }
    // Results are still delivered.
    rig.answer(1, ResultKind::Plain);
    assert_eq!(rig.batch(), 1);
}
