use proptest::prelude::*;

use super::*;

fn order(shuffle: bool, seed: u64, epoch: u64, window: usize) -> Order {
    Order { shuffle, seed, epoch, window }
}

fn batches(plan: &Plan) -> Vec<Vec<u32>> {
    (0..plan.batches()).map(|number| plan.batch(number)).collect()
}

fn sorted(batches: &[Vec<u32>]) -> Vec<u32> {
    let mut indices: Vec<u32> = batches.concat();
    indices.sort_unstable();
    indices
}

prop_compose! {
    fn orders()(shuffle: bool, seed: u64, epoch in 0..9u64, window in 1..70usize) -> Order {
        order(shuffle, seed, epoch, window)
    }
}

proptest! {
    #[test]
    fn budgets_are_held_and_samples_come_once(
        lengths in prop::collection::vec(1..60u32, 0..200), order in orders(),
        max_tokens in 60..400u64, max_samples in 1..9u64, multiple in 1..9u64,
    ) {
        // The longest sample fits after padding.
        let max_tokens = max_tokens.next_multiple_of(multiple);
        let plan = budget(&lengths, &order, max_tokens, max_samples, multiple);
        let batches = batches(&plan);
        prop_assert_eq!(sorted(&batches), (0..lengths.len() as u32).collect::<Vec<_>>());
        for batch in &batches {
            let longest = batch.iter().map(|&i| u64::from(lengths[i as usize])).max().unwrap();
            let tokens = batch.len() as u64 * longest.next_multiple_of(multiple);
            prop_assert!(tokens <= max_tokens && batch.len() as u64 <= max_samples);
        }
    }

    #[test]
    fn packs_hold_their_capacity_and_samples_come_once(
        lengths in prop::collection::vec(1..90u32, 0..200), order in orders(),
        capacity in 1..80u32, per_batch in 1..4usize, skip_too_long: bool,
    ) {
        let plan = packs(&lengths, &order, capacity as usize, per_batch, skip_too_long);
        let kept = |&i: &u32| !skip_too_long || lengths[i as usize] <= capacity;
        prop_assert_eq!(sorted(&batches(&plan)), (0..lengths.len() as u32).filter(kept).collect::<Vec<_>>());
        for pack in batches(&packs(&lengths, &order, capacity as usize, 1, skip_too_long)) {
            let tokens: u32 = pack.iter().map(|&i| lengths[i as usize].min(capacity)).sum();
            prop_assert!(!pack.is_empty() && tokens <= capacity);
        }
    }

    #[test]
    fn packs_are_those_of_a_plain_best_fit(lengths in prop::collection::vec(1..300u32, 1..80)) {
        let plan = packs(&lengths, &order(false, 0, 0, 1000), 300, 1, false);
        let mut longest_first = lengths.clone();
        longest_first.sort_unstable_by(|a, b| b.cmp(a));
        let mut rooms: Vec<u32> = Vec::new();
        for length in longest_first {
            match rooms.iter_mut().filter(|room| **room >= length).min() {
                Some(room) => *room -= length,
                None => rooms.push(300 - length),
            }
        }
        let room = |pack: Vec<u32>| 300 - pack.iter().map(|&i| lengths[i as usize]).sum::<u32>();
        let mut planned: Vec<u32> = batches(&plan).into_iter().map(room).collect();
        planned.sort_unstable();
        rooms.sort_unstable();
        prop_assert_eq!(planned, rooms);
    }
}

/// Programs resume runs of earlier versions, so these numbers must never change.
#[test]
fn plans_are_the_same_in_every_version() {
    let lengths = [3, 9, 4, 9, 1, 7, 2, 8, 5, 6];
    assert_eq!(batches(&budget(&lengths, &order(true, 7, 2, 5), 18, 4, 2)), BUDGET);
    assert_eq!(batches(&packs(&lengths, &order(true, 7, 3, 8), 10, 2, false)), PACKS);
}

const BUDGET: &[&[u32]] = &[&[1], &[9, 2, 6], &[7, 5], &[3], &[4, 0, 8]];
const PACKS: &[&[u32]] = &[&[6, 7], &[5, 0, 3], &[8, 9, 2], &[1, 4]];

#[test]
fn windows_ascend_and_descend_in_turn() {
    let plan = budget(&[5, 3, 4, 1, 2, 6], &order(false, 0, 0, 3), 1 << 20, 3, 1);
    assert_eq!(batches(&plan), [[1, 2, 0], [5, 4, 3]]);
}
