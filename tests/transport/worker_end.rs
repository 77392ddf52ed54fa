//! Whatever the main process's end of a connection may do wrong, the worker leaves.

use std::io::{Read, Write};
use std::net::Shutdown;

use proptest::prelude::*;
use rustloader::transport::frame::{FIXED, HEAD, Head, Kind, words};

use super::*;

/// Returns a bare socket instead of a main process, and a worker.
fn raw(transport: Transport) -> (UnixStream, Worker) {
    let (one, other) = raw_sockets(transport);
    (other, Worker::over(one, ARENA / 2))
}

/// Returns the bytes of a task frame.
fn frame(task: u64, payload: &[u8]) -> Vec<u8> {
    let head = Head { kind: Kind::Task, count: TaskKind::Plain as u32, len: payload.len() as u64 };
    [&head.to_bytes()[..], &task.to_le_bytes(), payload].concat()
}

impl Worker {
    /// Returns the tasks that it still receives. Waits until its process is notified of the end.
    fn ended(&self) -> Vec<(u64, Vec<u8>)> {
        let tasks = std::iter::from_fn(|| self.next()).map(|(entry, payload)| (entry.task, payload)).collect();
        wait_until(|| self.lost.load(Relaxed));
        tasks
    }
}

/// Receives a frame from a worker. Returns its kind, the task, and the leaves.
fn receive(from: &mut impl Read) -> (Kind, u64, Vec<Vec<u8>>) {
    let take = |from: &mut dyn Read, len: u64| {
        let mut bytes = vec![0; len as usize];
        from.read_exact(&mut bytes).unwrap();
        bytes
    };
    let head = take(from, HEAD as u64).try_into().unwrap();
    let Head { kind, count, len } = Head::from_bytes(&head, 1 << 30).unwrap();
    if kind != Kind::Result {
        return (kind, 0, Vec::new());
    }
    let task = words(&take(from, FIXED as u64)).next().unwrap();
    let lens: Vec<u64> = words(&take(from, 8 * u64::from(count))).collect();
    take(from, len);
    (kind, task, lens.into_iter().map(|len| take(from, len)).collect())
}

#[test]
fn a_connection_that_is_cut_at_any_byte_ends_the_worker_and_gives_it_no_part_of_a_task() {
    // Inline, in a small block, and in a block that is received in a separate call.
    let payloads = [&[1; 5][..], &[2; 100], &[3; 40_000]];
    for transport in SOCKETS {
        for payload in payloads {
            let (first, second) = (frame(0, b"first"), frame(1, payload));
            let step = if payload.len() < 1000 { 1 } else { 1999 };
            for cut in (0..24).chain((24..second.len()).step_by(step)).chain([second.len() - 1]) {
                let (mut other, worker) = raw(transport);
                other.write_all(&first).unwrap();
                other.write_all(&second[..cut]).unwrap();
                drop(other);
                // The worker may leave before it reads the first task.
                let tasks = worker.ended();
                assert!(tasks.is_empty() || tasks == [(0, b"first".to_vec())], "{transport:?} {cut}: {tasks:?}");
            }
            let (mut other, worker) = raw(transport);
            other.write_all(&second).unwrap();
            assert_eq!(worker.next().unwrap().1, payload);
        }
    }
}

#[test]
fn huge_lengths_and_what_no_main_process_sends_end_the_connection_before_memory_is_taken() {
    let task = |count, len| Head { kind: Kind::Task, count, len }.to_bytes().to_vec();
    let bare = |kind| Head::bare(kind).to_bytes().to_vec();
    for transport in SOCKETS {
        let (_, worker) = raw(transport);
        let region = worker.port.arena().geometry().region_len;
        drop(worker);
        let plain = TaskKind::Plain as u32;
        let bad = [
            task(plain, u64::MAX),
            task(plain, 1 << 63),
            task(plain, region + 1),
            task(99, 5),
            bare(Kind::Ready),
            bare(Kind::Left),
            Head { kind: Kind::Result, count: 1, len: 5 }.to_bytes().to_vec(),
            Head { kind: Kind::Stop, count: 0, len: 1 }.to_bytes().to_vec(),
            Head { kind: Kind::Kill, count: 1, len: 0 }.to_bytes().to_vec(),
            vec![0; 64],
            vec![0xff; 64],
        ];
        for bytes in bad {
            let (mut other, worker) = raw(transport);
            other.write_all(&bytes).unwrap();
            assert_eq!(worker.ended(), [], "{transport:?}: {bytes:?}");
            assert!(worker.port.arena().usage().warm < 4 << 20);
        }
    }
}

#[test]
fn more_tasks_than_may_be_outstanding_end_the_connection() {
    for transport in SOCKETS {
        let (mut other, worker) = raw(transport);
        // The worker takes none of them. The connection may end before everything is sent.
        (0..100).for_each(|task| _ = other.write_all(&frame(task, b"index")));
        wait_until(|| worker.lost.load(Relaxed));
    }
}

#[test]
fn a_slow_or_silent_main_process_is_waited_for_before_and_inside_a_frame() {
    for transport in SOCKETS {
        let (mut other, worker) = raw(transport);
        assert_eq!(receive(&mut other).0, Kind::Ready);
        for payload in [vec![1; 5], vec![2; 300]] {
            for (at, byte) in frame(7, &payload).iter().enumerate() {
                if [0, 8, 20, 100].contains(&at) {
                    std::thread::sleep(Duration::from_millis(50));
                    assert!(worker.port.take_up().unwrap().is_none() && !worker.port.stopping());
                }
                other.write_all(&[*byte]).unwrap();
            }
            let (entry, received) = worker.next().unwrap();
            assert_eq!((entry.task, received), (7, payload));
        }
    }
}

/// Reads a few bytes at a time.
struct Slow<'a>(&'a mut UnixStream);

impl Read for Slow<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let len = bytes.len().min(4999);
        self.0.read(&mut bytes[..len])
    }
}

#[test]
fn a_main_process_that_reads_slowly_or_late_holds_no_worker_back_and_gets_all() {
    for transport in SOCKETS {
        let (mut other, worker) = raw(transport);
        for task in 0..u64::from(OUTSTANDING) {
            other.write_all(&frame(task, b"index")).unwrap();
        }
        // This is more than the sockets can buffer.
        for task in 0..u64::from(OUTSTANDING) {
            assert_eq!(worker.next().unwrap().0.task, task);
            worker.answer(task, b"payload", &[4 << 20, 1]);
        }
        let mut slow = Slow(&mut other);
        assert_eq!(receive(&mut slow).0, Kind::Ready);
        for task in 0..u64::from(OUTSTANDING) {
            let leaves = vec![vec![task as u8; 4 << 20], vec![task as u8]];
            assert_eq!(receive(&mut slow), (Kind::Result, task, leaves), "{transport:?}");
        }
    }
}

#[test]
fn a_main_process_that_sends_no_more_has_ended_and_still_gets_results() {
    for transport in SOCKETS {
        let (mut other, worker) = raw(transport);
        other.write_all(&[frame(0, b"index"), frame(1, b"index")].concat()).unwrap();
        assert_eq!([0, 1].map(|_| worker.next().unwrap().0.task), [0, 1]);
        other.shutdown(Shutdown::Write).unwrap();
        assert_eq!(worker.ended(), []);
        worker.answer(0, b"", &[1 << 20]);
        let leaving = std::thread::spawn(move || worker.leave());
        assert_eq!(receive(&mut other).0, Kind::Ready);
        assert_eq!(receive(&mut other), (Kind::Result, 0, vec![vec![0; 1 << 20]]));
        assert_eq!(receive(&mut other).0, Kind::Left);
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        leaving.join().unwrap();
    }
}

#[test]
fn a_main_process_that_is_gone_while_a_worker_sends_ends_the_worker() {
    for transport in SOCKETS {
        let (mut other, worker) = raw(transport);
        other.write_all(&frame(0, b"index")).unwrap();
        worker.next().unwrap();
        worker.answer(0, b"", &[64 << 20]);
        assert_eq!(receive(&mut other).0, Kind::Ready);
        // The connection ends in the middle of the leaf.
        other.read_exact(&mut [0; 10_000]).unwrap();
        drop(other);
        assert_eq!(worker.ended(), []);
        worker.leave();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn garbage_ends_the_connection_or_waits_and_never_crashes(
        bytes in proptest::collection::vec(any::<u8>(), 1..200),
        at in 0..60_usize,
        tcp in any::<bool>(),
    ) {
        let (mut other, worker) = raw(if tcp { Transport::Tcp } else { Transport::Pair });
        // The garbage begins with the frame, or in the middle of it.
        let mut sent = frame(5, &[1; 40]);
        sent.splice(at.min(sent.len()).., bytes);
        let _ = other.write_all(&sent);
        drop(other);
        worker.ended();
    }
}
