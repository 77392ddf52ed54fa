//! Tells whether forked children are still alive.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::identity::FdIdentity;
use super::map::{Mapping, page_size};
use super::memfd;
use crate::error::Result;

/// Tells when the processes that were forked while its [`WitnessMapping`] existed have ended.
///
/// The mapping is one of an empty file. A child keeps it until it ends or calls exec, whatever descriptors it closes, and
/// passes it on to its own children. As long as any process has it, the kernel refuses to seal the file against writing.
#[derive(Debug)]
pub struct ForkWitness {
    file: OwnedFd,
    identity: FdIdentity,
}

/// What the children inherit, see [`ForkWitness`]. It is dropped in the parent after the fork, and never in a child.
#[derive(Debug)]
pub struct WitnessMapping(#[expect(dead_code, reason = "it exists to be inherited")] Mapping);

impl ForkWitness {
    /// A witness of the forks that happen while the mapping exists.
    pub fn new() -> Result<(Self, WitnessMapping)> {
        let file = memfd::create("rl_fork", page_size() as u64)?;
        let mapping = WitnessMapping(Mapping::new(file.as_fd(), page_size())?);
        let identity = FdIdentity::of(file.as_raw_fd())?;
        Ok((Self { file, identity }, mapping))
    }

    /// Whether no process has the mapping any more. Never blocks. False where that is unknown.
    pub fn all_ended(&self) -> bool {
        // The number may belong to another file by now, which must not be sealed.
        self.identity.same_inode(self.file.as_raw_fd()) && memfd::seal_writing(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_comes_when_no_process_has_the_mapping() {
        let (witness, mapping) = ForkWitness::new().unwrap();
        assert!(!witness.all_ended());
        drop(mapping);
        assert!(witness.all_ended());
        assert!(witness.all_ended());
    }
}
