//! The pin thread passes on each result once, in its worker's order, and before the worker's end. It can be stopped at
//! any moment, and runs no further ahead than the capacity of its channel.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustloader::engine::completions::{Completions, Message};
use rustloader::engine::pin::{self, Body, PinEvent, Prepare};
use rustloader::engine::{Ending, Engine, Handle, Incoming, Step};
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::shm::block::CONSUMER;
use rustloader::wire::{Leaf, ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Keep, Port, Received};

/// The number that stands for an error instead of a batch.
const ERROR: u64 = u64::MAX;
const LIMIT: Duration = Duration::from_secs(30);

/// What the fake does with each batch, by the number in its payload.
type Act = Arc<dyn Fn(u64) -> Result<(), String> + Send + Sync>;

/// Prepares a batch as its number, and drops its leaf.
struct Fake {
    act: Act,
    prepared: Arc<AtomicUsize>,
}

impl Prepare for Fake {
    type Ready = u64;

    fn prepare(&mut self, arena: &Arc<Arena>, incoming: &Incoming) -> Result<u64, String> {
        let mut message = Message::open(arena, incoming, Vec::new()).map_err(|error| error.to_string())?;
        let number = u64::from_le_bytes(message.payload().try_into().unwrap());
        drop(message.leaves.take(0).unwrap());
        (self.act)(number)?;
        self.prepared.fetch_add(1, SeqCst);
        Ok(number)
    }

    fn is_error(number: &u64) -> bool {
        *number == ERROR
    }
}

fn accept_all() -> Act {
    Arc::new(|_| Ok(()))
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
fn publish(port: &Port, task: u64, number: u64) {
    let (block, _) = port.allocate(20_000).unwrap();
    let leaf = (Leaf { block, len: 20_000 }, Keep::No);
    port.send(task, ResultKind::Plain, &[leaf], &number.to_le_bytes(), Timings::default()).unwrap();
}

/// Returns the number of blocks that the main process has not released.
fn held(arena: &Arc<Arena>) -> usize {
    let entries = |region| &arena.table(region)[..arena.block_count(region) as usize];
    (0..arena.geometry().regions()).flat_map(entries).filter(|entry| entry.state.load(SeqCst) & CONSUMER != 0).count()
}

fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "the condition never holds");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn end(handle: &Handle) {
    handle.stop_pinning();
    until(|| handle.pinning().unwrap().join(LIMIT));
}

/// An engine over ports in this process. A worker dies when its process, which only sleeps, is killed.
struct Rig {
    engine: Engine<u64, u64>,
    ports: Vec<Port>,
    processes: Vec<Child>,
    next: u64,
}

impl Rig {
    fn new(workers: usize, prefetch_factor: usize, in_order: bool, act: Act) -> Self {
        let arena = Arena::create_sized(1 << 30, workers as u32, (workers * prefetch_factor) as u32).unwrap();
        let settings = Settings::torch(workers, prefetch_factor, in_order);
        let mut engine = Engine::over(arena.clone(), settings).unwrap();
        let ports = open(&arena, engine.handle());
        let processes: Vec<Child> = (0..workers).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect();
        for (worker, process) in processes.iter().enumerate() {
            engine.started(worker as u32, process.id() as i32).unwrap();
        }
        engine.start_pinning(fake(act).0, Body::run).unwrap();
        let mut rig = Self { engine, ports, processes, next: 0 };
        (0..rig.engine.max_tasks()).for_each(|_| rig.submit());
        rig
    }

    fn submit(&mut self) {
        let number = self.next;
        self.next += 1;
        self.engine.submit(number, TaskKind::Plain, &number.to_le_bytes()).unwrap();
    }

    /// Answers a worker's next task, if it has one.
    fn answer(&self, worker: usize) -> Option<u64> {
        let arena = self.engine.arena();
        if arena.control(worker as u32).tasks.tail.0.load(SeqCst)
            == arena.control(worker as u32).tasks.head.0.load(SeqCst)
        {
            return None;
        }
        let Ok(Received::Task(entry)) = self.ports[worker].receive() else { return None };
        if entry.kind != TaskKind::Plain {
            return None;
        }
        let number = u64::from_le_bytes(entry.inline[..8].try_into().unwrap());
        publish(&self.ports[worker], entry.task, number);
        Some(number)
    }

    fn kill(&mut self, worker: usize) {
        self.processes[worker].kill().unwrap();
        self.processes[worker].wait().unwrap();
    }

    /// Stands for a user's `next`: returns a batch, or why there is none.
    fn next(&mut self, refill: bool) -> Result<u64, String> {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < LIMIT, "next hangs");
            match self.engine.step().unwrap() {
                Step::Deliver { tag, ready, .. } => {
                    assert_eq!(ready, Some(tag), "the batch of another task");
                    return Ok(tag);
                }
                Step::Submit if refill => self.submit(),
                Step::Submit => {}
                Step::Wait(deadline) => {
                    self.engine.wait(deadline).unwrap();
                    self.engine.after_wait().unwrap();
                }
                Step::Dead(death) => return Err(format!("worker {} is dead", death.worker.0)),
                Step::NoPinThread(cause) => return Err(cause),
                other => return Err(format!("{other:?}")),
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        (0..self.processes.len()).for_each(|worker| self.kill(worker));
    }
}

#[test]
fn a_second_pin_thread_is_refused_and_the_first_one_works_on() {
    let mut rig = Rig::new(1, 3, true, accept_all());
    assert!(rig.engine.start_pinning(fake(accept_all()).0, Body::run).is_err());
    rig.answer(0).unwrap();
    assert_eq!(rig.next(true), Ok(0));
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
        let arena = Arena::create_sized(1 << 30, 3, 96).unwrap();
        let handle = Arc::new(Handle::new(arena.clone()).unwrap());
        let ports = open(&arena, &handle);
        let slow: Act = Arc::new(move |_| {
            std::thread::sleep(Duration::from_micros(pause));
            Ok(())
        });
        let link = pin::start(fake(slow).0, &handle, Completions::new(&arena), 96, false, Body::run).unwrap();
        let (mut sent, mut delivered) = ([0u64; 3], vec![Vec::new(); 3]);
        let take = |delivered: &mut Vec<Vec<u64>>| match link.events.recv_timeout(LIMIT).unwrap() {
            PinEvent::Result(incoming, Some(number)) => delivered[incoming.worker as usize].push(number),
            other => panic!("{other:?}"),
        };
        for &(worker, count, and_take) in &sends {
            for _ in 0..count {
                publish(&ports[worker], sent[worker], sent[worker]);
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
        prop_assert_eq!(held(&arena), 0);
    }

    #[test]
    fn what_a_worker_had_published_comes_before_its_death(
        in_order in any::<bool>(), answers in 0..12usize, taken in 0..4usize, pause in 0..300u64,
    ) {
        let slow: Act = Arc::new(move |_| {
            std::thread::sleep(Duration::from_micros(pause));
            Ok(())
        });
        let mut rig = Rig::new(1, 4, in_order, slow);
        let (mut answered, mut delivered) = (0, Vec::new());
        for _ in 0..answers {
            answered += usize::from(rig.answer(0).is_some());
            if delivered.len() < taken.min(answered) {
                delivered.push(rig.next(true).unwrap());
            }
        }
        rig.kill(0);
        let last = loop {
            match rig.next(true) {
                Ok(number) => delivered.push(number),
                Err(cause) => break cause,
            }
        };
        prop_assert_eq!(delivered, (0..answered as u64).collect::<Vec<_>>());
        prop_assert_eq!(last, "worker 0 is dead");
        prop_assert_eq!(rig.next(true).unwrap_err(), "worker 0 is dead");
    }

    #[test]
    fn it_can_be_stopped_at_any_moment_and_all_is_given_back(
        workers in 1..4usize, in_order in any::<bool>(), rounds in 0..6usize, wait in 0..400u64, all in any::<bool>(),
    ) {
        let mut rig = Rig::new(workers, 3, in_order, accept_all());
        let mut due = 0;
        for _ in 0..rounds {
            for worker in 0..workers {
                due += usize::from(rig.answer(worker).is_some());
            }
            if due > 0 && rig.next(true).is_ok() {
                due -= 1;
            }
        }
        for worker in 0..workers {
            while rig.answer(worker).is_some() {}
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
        // The main process's own region holds index batches that no worker has taken; here they are inline.
        prop_assert_eq!(held(rig.engine.arena()), 0);
    }
}

#[test]
fn the_channel_is_bounded_and_a_consumer_that_comes_late_gets_all() {
    let arena = Arena::create_sized(1 << 30, 1, 60).unwrap();
    let handle = Arc::new(Handle::new(arena.clone()).unwrap());
    let ports = open(&arena, &handle);
    let (prepare, prepared) = fake(accept_all());
    let link = pin::start(prepare, &handle, Completions::new(&arena), 2, false, Body::run).unwrap();
    (0..40).for_each(|number| publish(&ports[0], number, number));
    let most = 2 + 4 + 4;
    until(|| link.events.len() == most && prepared.load(SeqCst) == most + 1);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!((link.events.len(), prepared.load(SeqCst)), (most, most + 1));
    for expected in 0..40 {
        match link.events.recv_timeout(LIMIT).unwrap() {
            PinEvent::Result(_, Some(number)) => assert_eq!(number, expected),
            other => panic!("{other:?}"),
        }
    }
    end(&handle);
}

#[test]
fn the_thread_has_released_everything_when_its_end_is_reported() {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    for _ in 0..200 {
        let handle = Arc::new(Handle::new(arena.clone()).unwrap());
        let link = pin::start(fake(accept_all()).0, &handle, Completions::new(&arena), 2, false, Body::run).unwrap();
        handle.stop_pinning();
        until(|| handle.pinning().unwrap().join(LIMIT));
        // The handle and the link hold the control.
        assert_eq!((Arc::strong_count(&handle), Arc::strong_count(&link.control)), (1, 2));
    }
}

#[test]
fn a_full_channel_does_not_keep_the_thread_from_ending() {
    let arena = Arena::create_sized(1 << 30, 1, 60).unwrap();
    let handle = Arc::new(Handle::new(arena.clone()).unwrap());
    let ports = open(&arena, &handle);
    let link = pin::start(fake(accept_all()).0, &handle, Completions::new(&arena), 2, false, Body::run).unwrap();
    (0..40).for_each(|number| publish(&ports[0], number, number));
    until(|| link.events.is_full());
    end(&handle);
    // Neither does a channel that is no longer read.
    drop(link);
}

#[test]
fn a_panic_is_reported_after_the_ready_batches() {
    let act: Act = Arc::new(|number| if number == 2 { panic!("it is two") } else { Ok(()) });
    let mut rig = Rig::new(1, 4, true, act);
    (0..4).for_each(|_| assert!(rig.answer(0).is_some()));
    assert_eq!((rig.next(false), rig.next(false)), (Ok(0), Ok(1)));
    for _ in 0..3 {
        assert_eq!(rig.next(false).unwrap_err(), "it panicked: it is two");
    }
    until(|| !rig.engine.handle().pinning().unwrap().is_alive());
}

#[test]
fn a_death_after_the_threads_end_is_reported_after_the_ready_batches() {
    let act: Act = Arc::new(|number| if number == 2 { Err("the end".into()) } else { Ok(()) });
    let mut rig = Rig::new(1, 4, true, act);
    (0..4).for_each(|_| assert!(rig.answer(0).is_some()));
    until(|| !rig.engine.handle().pinning().unwrap().is_alive());
    rig.kill(0);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!((rig.next(false), rig.next(false)), (Ok(0), Ok(1)));
    assert_eq!(rig.next(false).unwrap_err(), "worker 0 is dead");
}

#[test]
fn damage_is_an_error_for_good() {
    let mut rig = Rig::new(1, 4, true, accept_all());
    rig.answer(0).unwrap();
    assert_eq!(rig.next(false), Ok(0));
    let arena = rig.engine.arena().clone();
    arena.control(0).results.tail.0.store(10_000, SeqCst);
    rustloader::shm::doorbell::mark(arena.bitmap(), 0);
    rig.engine.handle().doorbell.ring().unwrap();
    let start = Instant::now();
    while rig.engine.step().is_ok() {
        assert!(start.elapsed() < LIMIT);
        rig.engine.wait(None).unwrap();
        rig.engine.after_wait().unwrap();
    }
    assert!(rig.engine.step().is_err());
}

#[test]
fn the_thread_knows_itself_and_does_not_wait_for_its_own_end() {
    let own = Arc::new(Mutex::new(None::<Arc<Handle>>));
    let seen = Arc::new(AtomicUsize::new(0));
    let (mine, count) = (own.clone(), seen.clone());
    let act: Act = Arc::new(move |_| {
        let handle = mine.lock().unwrap().clone().unwrap();
        count.fetch_add(usize::from(handle.pinning().unwrap().is_current()), SeqCst);
        Ok(())
    });
    let mut rig = Rig::new(1, 4, true, act);
    *own.lock().unwrap() = Some(rig.engine.handle().clone());
    rig.answer(0).unwrap();
    assert_eq!(rig.next(false), Ok(0));
    assert_eq!(seen.load(SeqCst), 1);
    assert!(!rig.engine.handle().pinning().unwrap().is_current());
}

/// The pin thread skips a tied result of a dead worker, and everything that the worker published after it.
#[test]
fn a_tied_result_of_a_dead_worker_is_made_again_by_its_next_process() {
    let arena = Arena::create_sized(1 << 30, 1, 4).unwrap();
    let settings = Settings { restarts: true, ..Settings::torch(1, 4, true) };
    let mut engine = Engine::<u64, u64>::over(arena.clone(), settings).unwrap();
    let mut port = open(&arena, engine.handle()).remove(0);
    let spawn = || Command::new("sleep").arg("1000").spawn().unwrap();
    let mut process = spawn();
    engine.started(0, process.id() as i32).unwrap();
    let (prepare, prepared) = fake(accept_all());
    engine.start_pinning(prepare, Body::run).unwrap();
    (0..3u64).for_each(|task| _ = engine.submit(task, TaskKind::Plain, &task.to_le_bytes()).unwrap());
    let take = |port: &Port, task| {
        let taken = |port: &Port| match port.receive() {
            Ok(Received::Task(entry)) => Some(entry.task),
            _ => None,
        };
        until(|| taken(port).is_some_and(|taken| taken == task));
    };
    let tied = |port: &Port, task, number: u64| {
        let (block, _) = port.allocate(20_000).unwrap();
        let leaf = (Leaf { block, len: 20_000 }, Keep::No);
        port.send(task, ResultKind::Tied, &[leaf], &number.to_le_bytes(), Timings::default()).unwrap();
    };
    let step = |engine: &mut Engine<u64, u64>| loop {
        match engine.step().unwrap() {
            Step::Submit => {}
            Step::Resend => {
                let index = *engine.unsent().unwrap();
                engine.resend(TaskKind::Plain, &index.to_le_bytes()).unwrap();
            }
            Step::Wait(deadline) => {
                engine.wait(deadline).unwrap();
                engine.after_wait().unwrap();
            }
            other => return other,
        }
    };
    // The first result counts even if it is an error, because its worker lives.
    take(&port, 0);
    tied(&port, 0, ERROR);
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 0, ready: Some(ERROR), .. }));
    process.kill().unwrap();
    process.wait().unwrap();
    take(&port, 1);
    tied(&port, 1, 1);
    take(&port, 2);
    publish(&port, 2, 2);
    assert!(matches!(step(&mut engine), Step::Vacant(death) if death.lost.map(|task| task.0) == Some(1)));
    assert_eq!((prepared.load(SeqCst), held(&arena)), (1, 0));
    engine.vacate(0).unwrap();
    process = spawn();
    engine.started(0, process.id() as i32).unwrap();
    port = open(&arena, engine.handle()).remove(0);
    assert!(matches!(engine.step().unwrap(), Step::Resend));
    for task in [1u64, 2] {
        assert_eq!(engine.unsent(), Some(&task));
        engine.resend(TaskKind::Plain, &task.to_le_bytes()).unwrap();
    }
    take(&port, 1);
    tied(&port, 1, 1);
    take(&port, 2);
    publish(&port, 2, 2);
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 1, ready: Some(1), .. }));
    assert!(matches!(step(&mut engine), Step::Deliver { tag: 2, ready: Some(2), .. }));
    end(engine.handle());
    process.kill().unwrap();
    process.wait().unwrap();
}
