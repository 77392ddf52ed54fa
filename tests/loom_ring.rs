//! Models of a ring that is full, is empty or wraps. `make test-loom` runs them.
#![cfg(loom)]

use loom::thread;
use rustloader::shm::layout::SLOT_WORDS;
use rustloader::shm::ring::heap::HeapRing;

#[test]
fn entries_arrive_whole_and_in_order_through_a_full_and_wrapping_ring() {
    loom::model(|| {
        let (mut producer, mut consumer) = HeapRing::new(2).split();
        let sender = thread::spawn(move || {
            let mut refused = 0;
            for value in 1..=3 {
                while producer.push(&[value; SLOT_WORDS]).is_err() {
                    refused += 1;
                    thread::yield_now();
                }
            }
            refused
        });
        let mut expected = 1;
        while expected <= 3 {
            match consumer.pop().unwrap() {
                Some(entry) => {
                    assert_eq!(entry, [expected; SLOT_WORDS]);
                    expected += 1;
                }
                None => thread::yield_now(),
            }
        }
        assert_eq!(consumer.pop().unwrap(), None);
        sender.join().unwrap();
    });
}

#[test]
fn an_unpublished_entry_is_not_seen() {
    loom::model(|| {
        let (mut producer, mut consumer) = HeapRing::new(2).split();
        let sender = thread::spawn(move || producer.push(&[7; SLOT_WORDS]).unwrap());
        match consumer.pop().unwrap() {
            Some(entry) => assert_eq!(entry, [7; SLOT_WORDS]),
            None => {
                sender.join().unwrap();
                assert_eq!(consumer.pop().unwrap(), Some([7; SLOT_WORDS]));
            }
        }
    });
}
