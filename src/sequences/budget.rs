//! Batches of samples of similar length, with a limit on their tokens after padding.

use super::plan::{Order, Plan, windows};

/// Plans batches of at most `max_samples` samples and `max_tokens` tokens: the number of samples times the longest
/// length, padded to a multiple of `multiple`. A longer sample gets a batch of its own.
///
/// Windows ascend and descend in turn, so that the end of one window and the start of the next have similar lengths.
/// The resulting order is cut whenever one more sample would exceed the budget.
pub fn budget(lengths: &[u32], order: &Order, max_tokens: u64, max_samples: u64, multiple: u64) -> Plan {
    let (mut indices, mut starts) = (Vec::with_capacity(lengths.len()), vec![0]);
    let (mut samples, mut longest) = (0, 0);
    let shuffler = windows(lengths, order, |number, window| {
        while let Some((index, length)) = if number % 2 == 0 { window.next() } else { window.next_back() } {
            let padded = length.next_multiple_of(multiple);
            (samples, longest) = (samples + 1, padded.max(longest));
            if samples > 1 && (samples > max_samples || samples * longest > max_tokens) {
                starts.push(indices.len() as u32);
                (samples, longest) = (1, padded);
            }
            indices.push(index);
        }
    });
    if samples > 0 {
        starts.push(indices.len() as u32);
    }
    Plan::new(indices, starts, 1, shuffler)
}
