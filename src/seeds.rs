//! The random numbers of `seed_by` and of plans for sequences. The generator is counter-based, so that the numbers of a
//! batch depend only on its [`Place`], and not on earlier batches.
//!
//! The generator is Philox4x64-10, from J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011. `numpy.random.Philox` computes the same function.
//!
//! The results of this module must never change, because a program may repeat a run from saved seeds with a later
//! version.

/// The paper's multipliers of a round.
const MULTIPLIERS: [u64; 2] = [0xd2e7_470e_e14c_6c93, 0xca5a_8263_9512_1157];
/// The paper's increments of the key after each round.
const WEYL: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbb67_ae85_84ca_a73b];
const ROUNDS: usize = 10;

/// The place of a batch, or of a sample, among all batches that a loader makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// 0 for the batch itself, including its collation; k + 1 for sample k of the batch.
    pub place: u64,
    /// The index of the batch in the epoch; for an iterable dataset, among the batches of its worker.
    pub ordinal: u64,
    /// 0 for a map-style dataset; the worker's ID + 1 for an iterable one.
    pub worker: u64,
    /// The number of epochs that the loader began before this one.
    pub epoch: u64,
}

/// Returns four independent random words for a base seed and a place.
pub fn words(base_seed: u64, at: Place) -> [u64; 4] {
    philox([at.place, at.ordinal, at.worker, at.epoch], [base_seed, 0])
}

/// Returns the four words of a counter and a key.
#[inline]
pub fn philox(mut counter: [u64; 4], mut key: [u64; 2]) -> [u64; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let (low0, high0) = multiply(MULTIPLIERS[0], counter[0]);
        let (low1, high1) = multiply(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// Returns the low word and the high word of a product.
fn multiply(a: u64, b: u64) -> (u64, u64) {
    let product = u128::from(a) * u128::from(b);
    (product as u64, (product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `kat_vectors` of the authors' library, Random123.
    #[test]
    fn the_function_is_the_published_one() {
        let zeros = [0x1655_4d9e_ca36_314c, 0xdb20_fe9d_672d_0fdc, 0xd7e7_72ce_e186_176b, 0x7e68_b68a_ec7b_a23b];
        assert_eq!(philox([0; 4], [0; 2]), zeros);
        let ones = [0x87b0_92c3_013f_e90b, 0x438c_3c67_be8d_0224, 0x9cc7_d7c6_9cd7_77b6, 0xa09c_aebf_594f_0ba0];
        assert_eq!(philox([u64::MAX; 4], [u64::MAX; 2]), ones);
        let counter = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344, 0xa409_3822_299f_31d0, 0x082e_fa98_ec4e_6c89];
        let key = [0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c];
        let pi = [0xa528_f454_03e6_1d95, 0x38c7_2dbd_566e_9788, 0xa5a1_610e_72fd_18b5, 0x57bd_43b5_e52b_7fe6];
        assert_eq!(philox(counter, key), pi);
    }

    /// The results must never change.
    #[test]
    fn each_part_of_a_place_has_its_own_word() {
        let at = Place { place: 3, ordinal: 5, worker: 7, epoch: 11 };
        assert_eq!(words(13, at), philox([3, 5, 7, 11], [13, 0]));
        let pinned = [0x2c58_0a79_95c9_dfb0, 0xd976_b36a_92f2_7bac, 0xedd4_bcc9_70d9_99ab, 0xc5dc_6492_727f_9c2f];
        assert_eq!(words(13, at), pinned);
        let first = Place { place: 0, ordinal: 0, worker: 0, epoch: 0 };
        let pinned = [0xfbbc_0fd7_0576_3d7d, 0x5941_ec5d_ac2b_d286, 0x7e84_4d9a_ba8c_946c, 0xeb11_e7c2_acb3_d49f];
        assert_eq!(words(u64::MAX, first), pinned);
    }
}
