//! What the scheduler costs for one batch: dispatch, completion and delivery, without a thread and a clock.
//!
//! Completions come in a seeded random order within the window; they are drawn beforehand, so that only the
//! scheduler is timed. `Melem/s` counts batches: 10 Melem/s is 100 ns for a batch.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rustloader::id::{TaskId, WorkerId};
use rustloader::scheduler::{Decision, Event, Scheduler, Settings};
use std::hint::black_box;
use std::time::Duration;

/// Batches of one run: many windows, also for 1,024 workers.
const BATCHES: usize = 100_000;

type Bench = Scheduler<u64, u64>;

fn scheduler(workers: usize, in_order: bool) -> Bench {
    Bench::new(Settings::torch(workers, 2, in_order)).expect("these settings are in range")
}

/// Primes the window, then feeds completions and takes batches until `BATCHES` have come. `submitted` sees each
/// dispatched task, `complete` names the next one to be completed.
fn run(
    mut scheduler: Bench,
    mut submitted: impl FnMut(TaskId, WorkerId),
    mut complete: impl FnMut() -> (TaskId, WorkerId),
) {
    for tag in 0..scheduler.max_tasks() as u64 {
        let (task, worker) = scheduler.submit(tag).expect("the window has room");
        submitted(task, worker);
    }
    let mut delivered = 0;
    while delivered < BATCHES {
        match scheduler.next() {
            Decision::Wait(_) => {
                let (task, worker) = complete();
                let event = Event::Completed { worker, task, result: task.0 };
                scheduler.on_event(Duration::ZERO, event).expect("the trace follows the protocol");
            }
            Decision::Submit => {
                let (task, worker) = scheduler.submit(delivered as u64).expect("one place has become free");
                submitted(task, worker);
            }
            Decision::Deliver { task, worker, tag, result } => {
                black_box((task, worker, tag, result));
                delivered += 1;
            }
            other => panic!("unexpected step {other:?}"),
        }
    }
}

/// The completions of a run in which a random worker among those that hold tasks finishes next.
fn trace(workers: usize, in_order: bool) -> Vec<(TaskId, WorkerId)> {
    let fifos = std::cell::RefCell::new(vec![std::collections::VecDeque::new(); workers]);
    let mut trace = Vec::with_capacity(BATCHES + 2 * workers);
    let mut seed = 42_u64;
    run(
        scheduler(workers, in_order),
        |task, worker| fifos.borrow_mut()[worker.index()].push_back(task),
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
    for (name, in_order) in [("in_order", true), ("out_of_order", false)] {
        let mut group = criterion.benchmark_group(format!("scheduler/{name}"));
        group.throughput(Throughput::Elements(BATCHES as u64));
        for workers in [1, 16, 256, 1_024] {
            let trace = trace(workers, in_order);
            group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
                bencher.iter(|| {
                    let mut completions = trace.iter().copied();
                    run(scheduler(workers, in_order), |_, _| (), || completions.next().expect("long enough"));
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, batches);
criterion_main!(benches);
