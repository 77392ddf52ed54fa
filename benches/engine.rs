//! From the doorbell to delivery: a worker's answer passes through ring, bitmap, scheduler and message, with 1 to 1,024
//! rings (goal: the time per batch does not grow).

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rustloader::engine::completions::Message;
use rustloader::engine::{Engine, Step};
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::wire::{ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

/// Lets a worker take its next task and answer it.
fn answer(port: &Port) {
    let Ok(Received::Task(task)) = port.receive() else { panic!("a worker without a task") };
    port.send(task.task, ResultKind::Plain, &[], &[1; 40], Timings::default()).unwrap();
}

/// Delivers the next batch, and submits the task that the engine asks for. Returns the buffer for reuse.
fn deliver(arena: &Arc<Arena>, engine: &mut Engine<u64>, buffer: Vec<u8>) -> Vec<u8> {
    loop {
        match engine.step().unwrap() {
            Step::Submit => {
                engine.submit(1, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
            }
            Step::Deliver { incoming, .. } => {
                let message = Message::open(arena, &incoming, buffer).unwrap();
                black_box(message.payload());
                return message.into_buffer();
            }
            other => panic!("{other:?}"),
        }
    }
}

fn delivery(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine");
    for workers in [1usize, 16, 256, 1024] {
        let arena = Arena::create_sized(8 << 30, workers as u32, 2 * workers as u32).unwrap();
        let settings = Settings { persistent: true, ..Settings::torch(workers, 2, true) };
        let mut engine: Engine<u64> = Engine::over(arena.clone(), settings).unwrap();
        let ports: Vec<Port> = (0..workers)
            .map(|worker| {
                let doorbell = engine.handle().doorbell.as_fd().try_clone_to_owned().unwrap();
                Port::open(arena.clone(), worker as u32, doorbell).unwrap()
            })
            .collect();
        for tag in 0..2 * workers as u64 {
            engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
        }
        let mut buffer = Vec::new();
        group.bench_function(BenchmarkId::new("deliver + submit", workers), |b| {
            b.iter_custom(|iterations| {
                let (mut spent, mut left) = (Duration::ZERO, iterations);
                while left > 0 {
                    // All workers answer all their tasks. Only the main process's part is timed.
                    for _ in 0..2 {
                        ports.iter().for_each(answer);
                    }
                    let round = 2 * workers as u64;
                    let start = Instant::now();
                    for _ in 0..round {
                        buffer = deliver(&arena, &mut engine, std::mem::take(&mut buffer));
                    }
                    let counted = left.min(round);
                    spent += start.elapsed().mul_f64(counted as f64 / round as f64);
                    left -= counted;
                }
                spent
            });
        });
    }
    group.finish();
}

criterion_group!(benches, delivery);
criterion_main!(benches);
