//! Open packs by the room that they have.

const NONE: u32 = u32::MAX;

/// A stack of packs for each number of free tokens, and a tree of bitmaps over the stacks that are not empty. Each
/// operation takes O(log capacity) steps, of 6 bits each.
pub struct FreeList {
    /// The newest pack of each stack.
    heads: Vec<u32>,
    /// The pack below each pack in its stack.
    below: Vec<u32>,
    /// Bit `i` of level 0 is set if stack `i` has packs; bit `i` of level n+1 if word `i` of level n is not 0.
    levels: Vec<Vec<u64>>,
}

impl FreeList {
    pub fn new(capacity: u32) -> Self {
        let stacks = capacity as usize + 1;
        let (mut words, mut levels) = (stacks, Vec::new());
        while words > 1 || levels.is_empty() {
            words = words.div_ceil(64);
            levels.push(vec![0; words]);
        }
        Self { heads: vec![NONE; stacks], below: Vec::new(), levels }
    }

    /// Adds a pack with `room` free tokens. Packs are numbered from 0.
    pub fn put(&mut self, pack: u32, room: usize) {
        let size = self.below.len().max(pack as usize + 1);
        self.below.resize(size, NONE);
        self.below[pack as usize] = std::mem::replace(&mut self.heads[room], pack);
        let mut bit = room;
        for level in &mut self.levels {
            level[bit / 64] |= 1 << (bit % 64);
            bit /= 64;
        }
    }

    /// Removes the newest pack of those with the least room that is at least `room`. Returns the pack and its room.
    pub fn take(&mut self, room: usize) -> Option<(u32, usize)> {
        let room = self.first_from(room)?;
        let pack = self.heads[room];
        self.heads[room] = self.below[pack as usize];
        let (mut bit, mut is_empty) = (room, self.heads[room] == NONE);
        for level in &mut self.levels {
            if !is_empty {
                break;
            }
            level[bit / 64] &= !(1 << (bit % 64));
            is_empty = level[bit / 64] == 0;
            bit /= 64;
        }
        Some((pack, room))
    }

    /// Returns the first stack from `at` on that has packs.
    fn first_from(&self, mut at: usize) -> Option<usize> {
        for (number, level) in self.levels.iter().enumerate() {
            let word = level.get(at / 64)? & (u64::MAX << (at % 64));
            if word != 0 {
                let found = at / 64 * 64 + word.trailing_zeros() as usize;
                let down = |at: usize, level: &Vec<u64>| at * 64 + level[at].trailing_zeros() as usize;
                return Some(self.levels[..number].iter().rev().fold(found, down));
            }
            at = at / 64 + 1;
        }
        None
    }
}
