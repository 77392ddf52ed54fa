//! The cost of the scheduler per batch: dispatch, completion and delivery, without threads or clocks.
//!
//! Completions arrive in a random order within the window. The order is drawn beforehand from a seed, so that only the
//! scheduler is timed. `Melem/s` counts batches: 10 Melem/s is 100 ns per batch.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rustloader::id::{TaskId, WorkerId};
use rustloader::scheduler::{Decision, Dispatch, Event, Placement, Scheduler, Settings, Window};
use std::hint::black_box;
use std::time::Duration;

/// Number of batches of one run: many windows, even for 1,024 workers.
const BATCHES: usize = 100_000;

type Bench = Scheduler<u64, u64>;

/// The settings of one group of benchmarks.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    in_order: bool,
    dispatch: Option<Dispatch>,
    /// A window of this many times the maximum number of outstanding tasks, in batches and in bytes.
    window: Option<usize>,
}

const CASES: [Case; 4] = [
    Case { name: "in_order", in_order: true, dispatch: None, window: None },
    Case { name: "out_of_order", in_order: false, dispatch: None, window: None },
    Case { name: "window", in_order: true, dispatch: None, window: Some(4) },
    Case { name: "shared_queue", in_order: true, dispatch: Some(Dispatch::SharedQueue), window: Some(4) },
];

fn scheduler(workers: usize, case: Case) -> Bench {
    let torch = Settings::torch(workers, 2, case.in_order);
    let batches = |times| times * torch.max_tasks();
    let window = case.window.map(|times| Window { batches: batches(times), bytes: Some(batches(times) as u64) });
    let settings = Settings { dispatch: case.dispatch.unwrap_or(torch.dispatch), window, ..torch };
    Bench::new(settings).expect("these settings are in range")
}

/// Primes the window, then feeds completions and takes batches until `BATCHES` are delivered. `submitted` is called
/// with each dispatched task; `complete` returns the next task to complete, and its worker.
fn run(
    mut scheduler: Bench,
    mut submitted: impl FnMut(TaskId, Placement),
    mut complete: impl FnMut() -> (TaskId, WorkerId),
) {
    let mut tag = 0;
    while scheduler.primes(tag as usize) {
        let (task, placement) = scheduler.submit(tag).expect("the window has room");
        submitted(task, placement);
        tag += 1;
    }
    let mut delivered = 0;
    while delivered < BATCHES {
        match scheduler.next(true) {
            Decision::Wait(_) => {
                let (task, worker) = complete();
                let event = Event::Completed { worker, task, result: task.0, bytes: 1 };
                scheduler.on_event(Duration::ZERO, event).expect("the trace follows the protocol");
            }
            Decision::Submit => {
                let (task, placement) = scheduler.submit(delivered as u64).expect("one place has become free");
                submitted(task, placement);
            }
            Decision::Deliver { task, worker, tag, result } => {
                black_box((task, worker, tag, result));
                delivered += 1;
            }
            other => panic!("unexpected decision {other:?}"),
        }
    }
}

/// Returns the completions of a run in which each completion is by a random worker that has tasks.
fn trace(workers: usize, case: Case) -> Vec<(TaskId, WorkerId)> {
    let fifos = std::cell::RefCell::new(vec![std::collections::VecDeque::new(); workers]);
    let mut trace = Vec::with_capacity(BATCHES + 2 * workers);
    let mut seed = 42_u64;
    run(
        scheduler(workers, case),
        |task, placement| {
            let mut fifos = fifos.borrow_mut();
            // The workers of a shared queue take tasks one by one; any worker may have taken this one.
            let worker = match placement {
                Placement::Worker(worker) => worker.index(),
                Placement::Queue => task.0 as usize % fifos.len(),
                Placement::Later => unreachable!("no worker is replaced"),
            };
            fifos[worker].push_back(task);
        },
        || {
            loop {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let worker = (seed >> 33) as usize % workers;
                if let Some(task) = fifos.borrow_mut()[worker].pop_front() {
                    trace.push((task, WorkerId(worker as u32)));
                    return trace[trace.len() - 1];
                }
            }
        },
    );
    trace
}

fn batches(criterion: &mut Criterion) {
    for case in CASES {
        let mut group = criterion.benchmark_group(format!("scheduler/{}", case.name));
        group.throughput(Throughput::Elements(BATCHES as u64));
        for workers in [1, 16, 256, 1_024] {
            let trace = trace(workers, case);
            group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
                bencher.iter(|| {
                    let mut completions = trace.iter().copied();
                    run(scheduler(workers, case), |_, _| (), || completions.next().expect("long enough"));
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, batches);
criterion_main!(benches);
