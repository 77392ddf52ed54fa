//! Open packs by the room that they have.

/// A stack of packs for each number of free tokens, and a tree of bitmaps over the stacks that are not empty: bit `i` of
/// level 0 is set if stack `i` has packs, bit `i` of a higher level if word `i` below is not 0.
pub struct FreeList {
    /// The newest pack of each stack.
    heads: Vec<u32>,
    /// The next older pack in the stack of each pack.
    older: Vec<u32>,
    levels: Vec<Vec<u64>>,
}

/// The end of a stack.
const NONE: u32 = u32::MAX;

impl FreeList {
    pub fn new(capacity: usize) -> Self {
        let mut levels = vec![vec![0; capacity / 64 + 1]];
        while levels[levels.len() - 1].len() > 1 {
            levels.push(vec![0; levels[levels.len() - 1].len().div_ceil(64)]);
        }
        Self { heads: vec![NONE; capacity + 1], older: Vec::new(), levels }
    }

    /// Adds a pack with `room` free tokens.
    pub fn put(&mut self, pack: u32, room: usize) {
        self.older.resize(self.older.len().max(pack as usize + 1), NONE);
        self.older[pack as usize] = std::mem::replace(&mut self.heads[room], pack);
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
        self.heads[room] = self.older[pack as usize];
        let (mut bit, mut is_set) = (room, self.heads[room] != NONE);
        for level in &mut self.levels {
            level[bit / 64] &= !(u64::from(!is_set) << (bit % 64));
            is_set |= level[bit / 64] != 0;
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
                let below = |at: usize, level: &Vec<u64>| at * 64 + level[at].trailing_zeros() as usize;
                return Some(self.levels[..number].iter().rev().fold(found, below));
            }
            at = at / 64 + 1;
        }
        None
    }
}
