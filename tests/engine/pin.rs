//! The pin thread passes on each result once, in its worker's order, and before the worker's end. It can be stopped at
//! any moment, and runs no further ahead than the capacity of its channel.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rustloader::engine::completions::{Completions, Message};
use rustloader::engine::pin::{self, Body, PinEvent, Prepare};
use rustloader::engine::{Ending, Handle, Incoming, Step};
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::wire::{Leaf, ResultKind, Timings};
use rustloader::worker::port::{Keep, Port};

use super::rig::{LIMIT, Rig, held, until};

/// The number that stands for an error instead of a batch.
const ERROR: u64 = u64::MAX;

/// What the fake does with each batch, by the number in its payload.
type Act = Arc<dyn Fn(u64) -> Result<(), String> + Send + Sync>;

/// Prepares a batch as its payload, and drops its leaf.
struct Fake {
    act: Act,
    prepared: Arc<AtomicUsize>,
}

impl Prepare for Fake {
    type Ready = Vec<u8>;

    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> Result<Vec<u8>, String> {
        let mut message = Message::open(arena, incoming, Vec::new()).map_err(|error| error.to_string())?;
        let payload = message.payload().to_vec();
        drop(message.leaves.take(0).unwrap());
        (self.act)(number_of(&payload))?;
        self.prepared.fetch_add(1, SeqCst);
        Ok(payload)
    }

    fn is_error(ready: &Vec<u8>) -> bool {
        number_of(ready) == ERROR
    }
}

fn number_of(payload: &[u8]) -> u64 {
    u64::from_le_bytes(payload.try_into().unwrap())
}

fn accept_all() -> Act {
    Arc::new(|_| Ok(()))
}

/// Takes this many microseconds for each batch.
fn slow(pause: u64) -> Act {
    Arc::new(move |_| {
        std::thread::sleep(Duration::from_micros(pause));
        Ok(())
    })
}

fn fake(act: Act) -> (Fake, Arc<AtomicUsize>) {
    let prepared = Arc::new(AtomicUsize::new(0));
    (Fake { act, prepared: prepared.clone() }, prepared)
}

fn open(arena: &Arc<Arena>, handle: &Handle) -> Vec<Port> {
    let doorbell = || handle.doorbell.as_fd().try_clone_to_owned().unwrap();
    (0..arena.geometry().workers).map(|worker| Port::open(arena.clone(), worker, doorbell()).unwrap()).collect()
}

/// Publishes batch `number` as a worker's result for a task, with one leaf.
fn publish_as(port: &Port, task: u64, kind: ResultKind, number: u64) {
    let (block, _) = port.allocate(20_000).unwrap();
    let leaf = (Leaf { block, len: 20_000 }, Keep::No);
    port.send(task, kind, &[leaf], &number.to_le_bytes(), Timings::default()).unwrap();
}

fn publish(port: &Port, number: u64) {
    publish_as(port, number, ResultKind::Plain, number);
}

fn end(handle: &Handle) {
    handle.stop_pinning();
    until(|| handle.pinning().unwrap().join(LIMIT));
}

/// Returns a rig with a pin thread.
fn pinned(settings: Settings, act: Act) -> Rig {
    let mut rig = Rig::new(settings);
    rig.engine.start_pinning(fake(act).0, Body::run).unwrap();
    rig
}

/// Returns a rig of one worker with four tasks, whose sampler yields nothing more.
fn single(act: Act) -> Rig {
    let mut rig = pinned(Settings::torch(1, 4, true), act);
    rig.submits = false;
    rig
}

/// Answers a worker's next task. Returns false if it has none.
fn answer(rig: &Rig, worker: usize) -> bool {
    let tasks = &rig.arena.control(worker as u32).tasks;
    let has_task = tasks.tail.0.load(SeqCst) != tasks.head.0.load(SeqCst);
    if has_task {
        publish(&rig.ports[worker], rig.take(worker).task);
    }
    has_task
}

/// Stands for a user's `next`: returns a batch, or why there is none.
fn next(rig: &mut Rig) -> Result<u64, String> {
    match rig.step() {
        Step::Deliver { tag, ready, .. } => {
            assert_eq!(ready, Some(tag.to_le_bytes().to_vec()), "the batch of another task");
            Ok(tag)
        }
        Step::Dead(death) => Err(format!("worker {} is dead", death.worker.0)),
        Step::NoPinThread(cause) => Err(cause),
        other => Err(format!("{other:?}")),
    }
}

/// Starts a pin thread without an engine, over an arena of `workers` workers.
fn start(workers: u32, capacity: usize, act: Act) -> (Arc<Handle>, pin::PinLink<Vec<u8>>, Vec<Port>, Arc<AtomicUsize>) {
    let arena = Arena::create_sized(1 << 30, workers, 96).unwrap();
    let handle = Arc::new(Handle::new(arena.clone()).unwrap());
    let (prepare, prepared) = fake(act);
    let link = pin::start(prepare, &handle, Completions::new(&arena), capacity, false, Body::run).unwrap();
    let ports = open(&arena, &handle);
    (handle, link, ports, prepared)
}

#[test]
fn a_second_pin_thread_is_refused_and_the_first_one_works_on() {
    let mut rig = single(accept_all());
    assert!(rig.engine.start_pinning(fake(accept_all()).0, Body::run).is_err());
    answer(&rig, 0);
    assert_eq!(next(&mut rig), Ok(0));
    // While the thread runs, nothing else may drain the rings, although the worker has left.
    rig.ports[0].leave();
    rig.kill(0);
    assert!(rig.engine.handle().all_left());
    assert!(matches!(rig.engine.finish(), Ending::Retire(_)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 40 } else { 200 }))]

    #[test]
    fn each_batch_comes_once_in_its_workers_order(
        sends in proptest::collection::vec((0..3usize, 1..5usize, any::<bool>()), 1..24),
        pause in 0..60u64,
    ) {
        let (handle, link, ports, _) = start(3, 96, slow(pause));
        let (mut sent, mut delivered) = ([0u64; 3], vec![Vec::new(); 3]);
        let take = |delivered: &mut Vec<Vec<u64>>| match link.events.recv_timeout(LIMIT).unwrap() {
            PinEvent::Result(incoming, Some(ready)) => delivered[incoming.worker as usize].push(number_of(&ready)),
            other => panic!("{other:?}"),
        };
        for &(worker, count, and_take) in &sends {
            for _ in 0..count {
                publish(&ports[worker], sent[worker]);
                sent[worker] += 1;
            }
            if and_take {
                take(&mut delivered);
            }
        }
        while delivered.iter().map(Vec::len).sum::<usize>() < sent.iter().sum::<u64>() as usize {
            take(&mut delivered);
        }
        for worker in 0..3 {
            prop_assert_eq!(&delivered[worker], &(0..sent[worker]).collect::<Vec<_>>());
        }
        end(&handle);
        prop_assert!(link.events.is_empty());
        prop_assert_eq!(held(ports[0].arena()), 0);
    }

    #[test]
    fn what_a_worker_had_published_comes_before_its_death(
        in_order in any::<bool>(), answers in 0..12usize, taken in 0..4usize, pause in 0..300u64,
    ) {
        let mut rig = pinned(Settings::torch(1, 4, in_order), slow(pause));
        let (mut answered, mut delivered) = (0, Vec::new());
        for _ in 0..answers {
            answered += usize::from(answer(&rig, 0));
            if delivered.len() < taken.min(answered) {
                delivered.push(next(&mut rig).unwrap());
            }
        }
        rig.kill(0);
        let last = loop {
            match next(&mut rig) {
                Ok(number) => delivered.push(number),
                Err(cause) => break cause,
            }
        };
        prop_assert_eq!(delivered, (0..answered as u64).collect::<Vec<_>>());
        prop_assert_eq!(last, "worker 0 is dead");
        prop_assert_eq!(next(&mut rig).unwrap_err(), "worker 0 is dead");
    }

    #[test]
    fn it_can_be_stopped_at_any_moment_and_all_is_given_back(
        workers in 1..4usize, in_order in any::<bool>(), rounds in 0..6usize, wait in 0..400u64, all in any::<bool>(),
    ) {
        let mut rig = pinned(Settings::torch(workers, 3, in_order), accept_all());
        for _ in 0..rounds {
            let answered = (0..workers).filter(|worker| answer(&rig, *worker)).count();
            if answered > 0 {
                next(&mut rig).unwrap();
            }
        }
        for worker in 0..workers {
            while answer(&rig, worker) {}
        }
        std::thread::sleep(Duration::from_micros(wait));
        let handle = rig.engine.handle().clone();
        if all {
            handle.close();
        }
        end(&handle);
        prop_assert!(!handle.pinning().unwrap().is_alive());
        rig.ports.iter().for_each(Port::leave);
        (0..workers).for_each(|worker| rig.kill(worker));
        let ending = rig.engine.finish();
        prop_assert!(matches!(ending, Ending::Pool(_)));
        prop_assert_eq!((held(&rig.arena), rig.payloads()), (0, 0));
    }
}

#[test]
fn the_channel_is_bounded_and_a_consumer_that_comes_late_gets_all() {
    let (handle, link, ports, prepared) = start(1, 2, accept_all());
    (0..40).for_each(|number| publish(&ports[0], number));
    let most = 2 + 4 + 4;
    until(|| link.events.len() == most && prepared.load(SeqCst) == most + 1);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!((link.events.len(), prepared.load(SeqCst)), (most, most + 1));
    for expected in 0..40 {
        match link.events.recv_timeout(LIMIT).unwrap() {
            PinEvent::Result(_, Some(ready)) => assert_eq!(number_of(&ready), expected),
            other => panic!("{other:?}"),
        }
    }
    end(&handle);
}

#[test]
fn a_full_channel_does_not_keep_the_thread_from_ending() {
    let (handle, link, ports, _) = start(1, 2, accept_all());
    (0..40).for_each(|number| publish(&ports[0], number));
    until(|| link.events.is_full());
    end(&handle);
    // Neither does a channel that is no longer read.
    drop(link);
}

#[test]
fn the_thread_has_released_everything_when_its_end_is_reported() {
    for _ in 0..200 {
        let (handle, link, ..) = start(1, 2, accept_all());
        end(&handle);
        // The handle and the link hold the control.
        assert_eq!((Arc::strong_count(&handle), Arc::strong_count(&link.control)), (1, 2));
    }
}

#[test]
fn a_panic_is_reported_after_the_ready_batches() {
    let mut rig = single(Arc::new(|number| if number == 2 { panic!("it is two") } else { Ok(()) }));
    (0..4).for_each(|_| assert!(answer(&rig, 0)));
    assert_eq!((next(&mut rig), next(&mut rig)), (Ok(0), Ok(1)));
    for _ in 0..3 {
        assert_eq!(next(&mut rig).unwrap_err(), "it panicked: it is two");
    }
    until(|| !rig.engine.handle().pinning().unwrap().is_alive());
}

#[test]
fn a_death_after_the_threads_end_is_reported_after_the_ready_batches() {
    let mut rig = single(Arc::new(|number| if number == 2 { Err("the end".into()) } else { Ok(()) }));
    (0..4).for_each(|_| assert!(answer(&rig, 0)));
    until(|| !rig.engine.handle().pinning().unwrap().is_alive());
    rig.kill(0);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!((next(&mut rig), next(&mut rig)), (Ok(0), Ok(1)));
    assert_eq!(next(&mut rig).unwrap_err(), "worker 0 is dead");
}

#[test]
fn damage_is_an_error_for_good() {
    let mut rig = single(accept_all());
    answer(&rig, 0);
    assert_eq!(next(&mut rig), Ok(0));
    rig.arena.control(0).results.tail.0.store(10_000, SeqCst);
    rustloader::shm::doorbell::mark(rig.arena.bitmap(), 0);
    rig.engine.handle().doorbell.ring().unwrap();
    until(|| {
        let is_damaged = rig.engine.step().is_err();
        rig.wait(Some(Duration::ZERO));
        is_damaged
    });
    assert!(rig.engine.step().is_err());
}

#[test]
fn the_thread_knows_itself_and_does_not_wait_for_its_own_end() {
    let own = Arc::new(Mutex::new(None::<Arc<Handle>>));
    let seen = Arc::new(AtomicUsize::new(0));
    let (mine, count) = (own.clone(), seen.clone());
    let mut rig = single(Arc::new(move |_| {
        let handle = mine.lock().unwrap().clone().unwrap();
        count.fetch_add(usize::from(handle.pinning().unwrap().is_current()), SeqCst);
        Ok(())
    }));
    *own.lock().unwrap() = Some(rig.engine.handle().clone());
    answer(&rig, 0);
    assert_eq!((next(&mut rig), seen.load(SeqCst)), (Ok(0), 1));
    assert!(!rig.engine.handle().pinning().unwrap().is_current());
}

/// The pin thread skips a tied result of a dead worker, and everything that the worker published after it.
#[test]
fn a_tied_result_of_a_dead_worker_is_made_again_by_its_next_process() {
    let mut rig = Rig::new(Settings { restarts: true, ..Settings::torch(1, 4, true) });
    let (prepare, prepared) = fake(accept_all());
    rig.engine.start_pinning(prepare, Body::run).unwrap();
    rig.submits = false;
    let tied = |rig: &Rig, number| publish_as(&rig.ports[0], rig.take(0).task, ResultKind::Tied, number);
    // The first result counts even if it is an error, because its worker lives.
    tied(&rig, ERROR);
    assert!(matches!(rig.step(), Step::Deliver { tag: 0, ready: Some(ready), .. } if number_of(&ready) == ERROR));
    rig.kill(0);
    tied(&rig, 1);
    answer(&rig, 0);
    assert!(matches!(rig.step(), Step::Vacant(death) if death.lost.map(|task| task.0) == Some(1)));
    assert_eq!((prepared.load(SeqCst), held(&rig.arena)), (1, 0));
    rig.replace(0);
    for tag in 1..4 {
        assert!(matches!(rig.engine.step().unwrap(), Step::Resend));
        assert_eq!(rig.resend(), tag);
    }
    tied(&rig, 1);
    answer(&rig, 0);
    assert_eq!((next(&mut rig), next(&mut rig)), (Ok(1), Ok(2)));
    end(rig.engine.handle());
}
