//! Blocks: allocating and freeing a warm block (goal: 50 ns or less), by the owner and through the return stack.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rustloader::shm::alloc::Allocator;
use rustloader::shm::arena::Arena;
use rustloader::shm::block::{CONSUMER, WORKER};
use rustloader::shm::lease::Lease;

fn blocks(c: &mut Criterion) {
    let mut group = c.benchmark_group("arena");
    let arena = Arena::create_sized(4 << 30, 1, 8).unwrap();
    for (name, len) in [("4 KiB", 4 << 10), ("1 MiB", 1 << 20), ("38 MB", 38_535_168)] {
        let mut allocator = Allocator::new(arena.clone(), 0);
        group.bench_function(format!("allocate + free, {name}"), |b| {
            b.iter(|| {
                let block = allocator.allocate(black_box(len), WORKER).unwrap();
                allocator.release(block);
            });
        });
        group.bench_function(format!("allocate + release by the consumer, {name}"), |b| {
            b.iter(|| {
                let block = allocator.allocate(black_box(len), CONSUMER).unwrap();
                arena.release(0, block, CONSUMER);
            });
        });
        group.bench_function(format!("allocate + lease + drop, {name}"), |b| {
            b.iter(|| {
                let block = allocator.allocate(black_box(len), CONSUMER).unwrap();
                drop(black_box(Lease::new(&arena, 0, block, len).unwrap()));
            });
        });
    }
    group.finish();
}

criterion_group!(benches, blocks);
criterion_main!(benches);
