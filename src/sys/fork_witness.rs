//! Detection of the end of forked children.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::identity::FdIdentity;
use super::map::{Mapping, page_size};
use super::memfd;
use crate::error::Result;

/// A witness that shows when all processes that were forked while its [`WitnessMapping`] existed have ended.
///
/// The mapped file is used for nothing else. A child keeps the mapping until it ends or calls exec, no matter which
/// descriptors it closes, and its own children inherit the mapping. While any process maps the file, the kernel refuses
/// to seal it against writing.
#[derive(Debug)]
pub struct ForkWitness {
    file: OwnedFd,
    identity: FdIdentity,
}

/// The mapping that children inherit; see [`ForkWitness`]. The parent drops it after the fork; a child never does.
#[derive(Debug)]
pub struct WitnessMapping(#[expect(dead_code, reason = "it exists to be inherited")] Mapping);

impl ForkWitness {
    /// Creates a witness of the forks that happen while the mapping exists.
    pub fn new() -> Result<(Self, WitnessMapping)> {
        let file = memfd::create("rl_fork", page_size() as u64)?;
        let mapping = WitnessMapping(Mapping::new(file.as_fd(), page_size())?);
        let identity = FdIdentity::of(file.as_raw_fd())?;
        Ok((Self { file, identity }, mapping))
    }

    /// Returns true if no process has the mapping; false if one still has it, or if that is unknown. Never blocks.
    pub fn all_ended(&self) -> bool {
        // The descriptor's number may name another file by now, which must not be sealed.
        self.identity.same_inode(self.file.as_raw_fd()) && memfd::seal_writing(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_have_ended_when_no_process_has_the_mapping() {
        let (witness, mapping) = ForkWitness::new().unwrap();
        assert!(!witness.all_ended());
        drop(mapping);
        assert!(witness.all_ended());
        assert!(witness.all_ended());
    }
}
