//! Doorbell to delivery: a worker's answer through ring, bitmap, scheduler and message, with 1 to 1,024 rings
//! (goal: equally flat).

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rustloader::engine::completions::Message;
use rustloader::engine::{Engine, Step};
use rustloader::scheduler::Settings;
use rustloader::shm::arena::Arena;
use rustloader::sys::memfd::dup_cloexec;
use rustloader::wire::{ResultKind, TaskKind, Timings};
use rustloader::worker::port::{Port, Received};

fn delivery(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine");
    for workers in [1usize, 16, 256, 1024] {
        let arena = Arena::create_sized(8 << 30, workers as u32, 2 * workers as u32).unwrap();
        let settings = Settings { workers, prefetch_factor: 2, in_order: true, persistent: true, timeout: None };
        let mut engine: Engine<u64> = Engine::over(arena.clone(), settings).unwrap();
        let ports: Vec<Port> = (0..workers)
            .map(|worker| {
                let doorbell = dup_cloexec(engine.hands().doorbell.as_fd()).unwrap();
                Port::open(arena.clone(), worker as u32, doorbell).unwrap()
            })
            .collect();
        for tag in 0..2 * workers as u64 {
            engine.submit(tag, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
        }
        let (mut next, mut buffer) = (0, Vec::new());
        group.bench_function(BenchmarkId::new("answer + deliver + submit", workers), |b| {
            b.iter(|| {
                let port = &ports[next % workers];
                next += 1;
                let Ok(Received::Task(task)) = port.receive() else { panic!("no task for {next}") };
                port.send(task.task, ResultKind::Plain, &[], &[1; 40], Timings::default()).unwrap();
                loop {
                    match engine.step().unwrap() {
                        Step::Submit => {
                            engine.submit(1, TaskKind::Plain, &[0; 8]).unwrap().unwrap();
                        }
                        Step::Deliver { incoming, .. } => {
                            let message = Message::open(&arena, &incoming, std::mem::take(&mut buffer)).unwrap();
                            black_box(message.payload());
                            buffer = message.into_buffer();
                            break;
                        }
                        other => panic!("{other:?}"),
                    }
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, delivery);
criterion_main!(benches);
