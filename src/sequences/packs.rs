//! Packs: samples that are concatenated without padding, up to a capacity.

use super::free_list::FreeList;
use super::{Order, Plan, windows};

/// The settings of packs.
#[derive(Clone, Copy, Debug)]
pub struct Packs {
    /// Maximum number of tokens of a pack.
    pub capacity: u32,
    /// Number of packs in a batch.
    pub per_batch: usize,
    /// Whether samples above the capacity are left out. Otherwise each fills a pack.
    pub skip_too_long: bool,
}

/// Plans packs by best fit over the samples of a window, the longest first: each sample goes to the pack that it leaves
/// the least room in (D. S. Johnson, "Near-optimal bin packing algorithms", 1973).
pub fn packs(count: u32, length: impl Fn(u32) -> u32, order: &Order, settings: &Packs) -> Plan {
    let capacity = settings.capacity as usize;
    let mut free = FreeList::new(settings.capacity);
    let (mut indices, mut starts) = (Vec::with_capacity(count as usize), vec![0]);
    // The samples of a window with their packs, and the end of each pack.
    let (mut placed, mut ends): (Vec<(u32, u32)>, Vec<u32>) = (Vec::new(), Vec::new());
    let shuffler = windows(count, length, order, |_, window| {
        placed.clear();
        ends.clear();
        while let Some(sample) = window.next_back() {
            if settings.skip_too_long && sample.length > capacity as u64 {
                continue;
            }
            let length = (sample.length as usize).min(capacity);
            let (pack, room) = free.take(length).unwrap_or((ends.len() as u32, capacity));
            if pack as usize == ends.len() {
                ends.push(0);
            }
            ends[pack as usize] += 1;
            placed.push((sample.index, pack));
            if room > length {
                free.put(pack, room - length);
            }
        }
        while free.take(0).is_some() {}
        // A counting sort by pack. While it runs, an end is where the next sample of the pack goes.
        let base = indices.len();
        let mut end = base as u32;
        for size in &mut ends {
            (*size, end) = (end, end + *size);
            starts.push(end);
        }
        indices.resize(base + placed.len(), 0);
        for &(index, pack) in &placed {
            indices[ends[pack as usize] as usize] = index;
            ends[pack as usize] += 1;
        }
    });
    indices.shrink_to_fit();
    Plan::new(indices, starts, settings.per_batch, shuffler)
}
