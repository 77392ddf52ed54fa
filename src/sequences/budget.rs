//! Batches of samples of similar length, with a limit on their tokens after padding.

use super::{Order, Plan, windows};

/// The limits of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Maximum number of tokens after padding: the number of samples times the padded length of the longest one.
    pub max_tokens: u64,
    /// Maximum number of samples.
    pub max_samples: u64,
    /// A batch's longest length is padded to a multiple of this number.
    pub multiple: u64,
}

/// Plans batches within a budget. A sample above the budget gets a batch of its own.
///
/// Windows are arranged in ascending and in descending order of length in turn, so that the end of one window and the
/// start of the next have similar lengths. The resulting order is cut whenever one more sample would exceed the budget.
pub fn budget(count: u32, length: impl Fn(u32) -> u32, order: &Order, budget: &Budget) -> Plan {
    let (mut indices, mut starts) = (Vec::with_capacity(count as usize), vec![0]);
    let (mut samples, mut longest) = (0, 0);
    let shuffler = windows(count, length, order, |number, window| {
        while let Some(sample) = if number % 2 == 0 { window.next() } else { window.next_back() } {
            let padded = sample.length.next_multiple_of(budget.multiple);
            longest = padded.max(longest);
            samples += 1;
            if samples > 1 && (samples > budget.max_samples || samples * longest > budget.max_tokens) {
                starts.push(indices.len() as u32);
                (samples, longest) = (1, padded);
            }
            indices.push(sample.index);
        }
    });
    if samples > 0 {
        starts.push(count);
    }
    Plan::new(indices, starts, 1, shuffler)
}
