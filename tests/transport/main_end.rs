//! Whatever a worker's end of a connection may do wrong, the main process's link notices.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;

use proptest::prelude::*;
use rustloader::transport::counters::COUNTERS;
use rustloader::transport::frame::{Head, Kind, put_words};
use rustloader::wire::{Load, ResultEntry};

use super::*;

/// Returns the bytes of a result frame.
fn frame(task: u64, leaves: &[usize], payload: &[u8]) -> Vec<u8> {
    let count = leaves.len() as u32;
    let mut bytes = Head { kind: Kind::Result, count, len: payload.len() as u64 }.to_bytes().to_vec();
    let (timings, load) = (Timings::default(), Load::default());
    let kind = ResultKind::Plain;
    let entry = ResultEntry { task, kind, block: Some(0), len: 0, checksum: 0, timings, load };
    put_words(&mut bytes, &entry.to_words());
    put_words(&mut bytes, &[0; COUNTERS]);
    put_words(&mut bytes, &leaves.iter().map(|len| *len as u64).collect::<Vec<_>>());
    bytes.extend_from_slice(payload);
    leaves.iter().for_each(|len| bytes.resize(bytes.len() + len, 9));
    bytes
}

/// Returns a main process that has sent a task, and a bare socket instead of a worker.
fn raw(transport: Transport) -> (Main, UnixStream) {
    let (one, mut other) = raw_sockets(transport);
    let mut main = Main::linked(one, ARENA);
    main.send(5, TaskKind::Plain, b"index");
    let mut task = [0; 16 + 8 + 5];
    other.read_exact(&mut task).unwrap();
    assert_eq!(&task[24..], b"index");
    (main, other)
}

/// Returns the reason that the link reports if the connection is closed after this many bytes of a frame.
fn closed(bytes: usize) -> &'static str {
    match bytes {
        0 => "the connection was closed",
        _ => "the connection broke: it was closed in the middle of a frame",
    }
}

#[test]
fn a_connection_that_is_cut_at_any_byte_is_an_end_and_leaves_no_block() {
    let check = |transport, whole: &[u8], cut| {
        let (main, mut other) = raw(transport);
        other.write_all(&whole[..cut]).unwrap();
        drop(other);
        let reason = main.ended().unwrap();
        assert_eq!(reason, closed(cut), "{transport:?} {cut}");
        assert_eq!(main.arena.bitmap()[0].load(Relaxed), 0);
    };
    for transport in SOCKETS {
        // Small leaves are read together with the head, a large leaf in a separate call.
        let small = frame(5, &[40, 10], b"payload");
        (0..small.len()).for_each(|cut| check(transport, &small, cut));
        let large = frame(5, &[200_000, 10], b"payload");
        let leaf = large.len() - 200_010;
        let cuts = (1..100).map(|part| leaf + 1999 * part);
        cuts.chain([leaf + 199_999, leaf + 200_000]).for_each(|cut| check(transport, &large, cut));
        let (mut main, mut other) = raw(transport);
        other.write_all(&large).unwrap();
        let incoming = main.take();
        assert_eq!(main.open(&incoming).1, [vec![9; 200_000], vec![9; 10]]);
    }
}

#[test]
fn a_worker_that_sends_no_more_has_ended_although_it_still_receives() {
    for transport in SOCKETS {
        for sent in [0, 1, 100] {
            let (main, mut other) = raw(transport);
            other.write_all(&frame(5, &[300], b"payload")[..sent]).unwrap();
            other.shutdown(Shutdown::Write).unwrap();
            assert_eq!(main.ended().unwrap(), closed(sent), "{transport:?}");
            // The worker's end is closed, too.
            assert_eq!(other.read(&mut [0]).unwrap(), 0);
        }
    }
}

#[test]
fn a_reset_is_an_end() {
    for transport in SOCKETS {
        let (mut main, other) = raw(transport);
        main.send(6, TaskKind::Plain, b"not read");
        wait_until(|| readable(&other));
        drop(other);
        assert!(main.ended().is_some());
    }
}

fn readable(socket: &UnixStream) -> bool {
    let mut bytes = [0; 1];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the buffer has one byte.
    unsafe { libc::recv(socket.as_raw_fd(), bytes.as_mut_ptr().cast(), 1, flags) == 1 }
}

#[test]
fn a_slow_or_silent_worker_is_waited_for_before_and_inside_a_frame() {
    for transport in SOCKETS {
        let (mut main, mut other) = raw(transport);
        let whole = frame(5, &[300], b"payload");
        for (at, byte) in whole.iter().enumerate() {
            if [0, 8, 100, whole.len() - 1].contains(&at) {
                std::thread::sleep(Duration::from_millis(50));
                assert!(!main.link.as_ref().unwrap().has_ended() && main.completions.pop(0).unwrap().is_none());
            }
            other.write_all(&[*byte]).unwrap();
        }
        let incoming = main.take();
        assert_eq!(main.open(&incoming), (b"payload".to_vec(), vec![vec![9; 300]]));
    }
}

#[test]
fn huge_and_wrong_lengths_end_the_connection_before_memory_is_taken() {
    let result = |count, len| Head { kind: Kind::Result, count, len }.to_bytes().to_vec();
    let huge_leaf = frame(5, &[], b"")[..].to_vec();
    let mut huge_leaf = [&result(1, 0), &huge_leaf[16..]].concat();
    huge_leaf.extend_from_slice(&(1_u64 << 40).to_le_bytes());
    let mut overflow = [&result(2, 0), &frame(5, &[], b"")[16..]].concat();
    put_words(&mut overflow, &[u64::MAX, u64::MAX]);
    let mut no_entry = frame(5, &[], b"");
    no_entry[24..32].fill(0xff);
    let bad: [(&str, Vec<u8>); 9] = [
        ("an invalid frame: kind", result(0, u64::MAX)),
        ("an invalid frame: kind", result(u32::MAX, 0)),
        ("exceeds a region", huge_leaf),
        ("exceeds a region", overflow),
        ("an invalid frame: kind", vec![0xff; 64]),
        ("a result entry of kind", no_entry),
        ("a worker sent a Task frame", Head { kind: Kind::Task, count: 1, len: 0 }.to_bytes().to_vec()),
        ("oldest unanswered task was Some((5, Plain))", frame(6, &[], b"")),
        ("after the worker's last one", [Head::bare(Kind::Left), Head::bare(Kind::Ready)].map(Head::to_bytes).concat()),
    ];
    for (transport, (reason, bytes)) in
        SOCKETS.into_iter().flat_map(|transport| bad.iter().map(move |bad| (transport, bad)))
    {
        let (main, mut other) = raw(transport);
        other.write_all(bytes).unwrap();
        let ended = main.ended().unwrap();
        assert!(ended.starts_with("the connection broke: ") && ended.contains(reason), "{transport:?}: {ended}");
        assert!(main.arena.usage().warm < 4 << 20);
    }
}

#[test]
fn an_answer_that_nothing_asked_for_ends_the_connection() {
    for transport in SOCKETS {
        let (one, mut other) = raw_sockets(transport);
        let main = Main::linked(one, ARENA);
        other.write_all(&frame(0, &[], b"")).unwrap();
        assert!(main.ended().unwrap().contains("oldest unanswered task was None"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn garbage_ends_the_connection_or_waits_and_never_crashes(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        at in 0..400_usize,
        tcp in any::<bool>(),
    ) {
        let (main, mut other) = raw(if tcp { Transport::Tcp } else { Transport::Pair });
        let mut sent = frame(5, &[100, 3], b"payload");
        let at = at.min(sent.len());
        let end = (at + bytes.len()).min(sent.len());
        sent.splice(at..end, bytes);
        // The link may end before everything is sent.
        let _ = other.write_all(&sent);
        drop(other);
        main.ended();
    }
}

#[test]
fn a_full_socket_does_not_hold_the_engine_back() {
    for transport in SOCKETS {
        // The worker reads nothing at first. The rest is sent once it does.
        let (one, mut other) = raw_sockets(transport);
        let mut main = Main::linked(one, ARENA);
        let payload = vec![3; 4 << 20];
        for task in 0..u64::from(OUTSTANDING) {
            main.send(task, TaskKind::Plain, &payload);
        }
        let mut bytes = vec![0; 24 + payload.len()];
        for task in 0..u64::from(OUTSTANDING) {
            other.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes[16..24], task.to_le_bytes());
            assert_eq!(bytes[24..], payload);
        }
    }
}
