//! One ring: pushing and popping an entry on one thread (goal: 30 ns or less).

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rustloader::shm::arena::Arena;
use rustloader::shm::layout::SLOT_WORDS;
use rustloader::shm::ring::{Consumer, Producer, heap::HeapRing};

fn ring(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    let (mut producer, mut consumer) = HeapRing::new(16).split();
    group.bench_function("push + pop, heap", |b| {
        b.iter(|| {
            producer.push(black_box(&[1; SLOT_WORDS])).unwrap();
            black_box(consumer.pop().unwrap())
        });
    });
    let arena = Arena::create_sized(1 << 30, 1, 8).unwrap();
    let (mut producer, mut consumer) = (Producer::new(arena.result_ring(0)), Consumer::new(arena.result_ring(0)));
    group.bench_function("push + pop, arena", |b| {
        b.iter(|| {
            producer.push(black_box(&[1; SLOT_WORDS])).unwrap();
            black_box(consumer.pop().unwrap())
        });
    });
    group.finish();
}

criterion_group!(benches, ring);
criterion_main!(benches);
