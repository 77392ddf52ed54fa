//! Packs: samples that are concatenated without padding, up to a capacity.

use super::free_list::FreeList;
use super::plan::{Order, Plan, windows};

/// Plans batches of `per_batch` packs of at most `capacity` tokens. Longer samples are left out, or fill a pack each.
///
/// Packs are made by best fit over the samples of a window, the longest first: each sample goes to the pack that it
/// leaves the least room in (D. S. Johnson, "Near-optimal bin packing algorithms", 1973).
pub fn packs(lengths: &[u32], order: &Order, capacity: usize, per_batch: usize, skip_too_long: bool) -> Plan {
    let mut free = FreeList::new(capacity);
    let (mut indices, mut starts) = (Vec::with_capacity(lengths.len()), vec![0]);
    // The samples of a window with their packs, and the size of each pack.
    let (mut placed, mut sizes): (Vec<(u32, u32)>, Vec<u32>) = (Vec::new(), Vec::new());
    let shuffler = windows(lengths, order, |_, window| {
        placed.clear();
        sizes.clear();
        while let Some((index, length)) = window.next_back() {
            let length = length as usize;
            if length > capacity && skip_too_long {
                continue;
            }
            let (pack, room) = free.take(length).unwrap_or((sizes.len() as u32, capacity));
            sizes.resize(sizes.len().max(pack as usize + 1), 0);
            sizes[pack as usize] += 1;
            placed.push((index, pack));
            if room > length {
                free.put(pack, room - length);
            }
        }
        while free.take(0).is_some() {}
        // A counting sort by pack. From here on, a size is the place of the next sample of the pack.
        let mut end = indices.len() as u32;
        indices.resize(indices.len() + placed.len(), 0);
        for size in &mut sizes {
            (*size, end) = (end, end + *size);
            starts.push(end);
        }
        for &(index, pack) in &placed {
            indices[sizes[pack as usize] as usize] = index;
            sizes[pack as usize] += 1;
        }
    });
    indices.shrink_to_fit();
    Plan::new(indices, starts, per_batch, shuffler)
}
