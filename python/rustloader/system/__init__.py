"""The parts of the system, of Python and of torch that the package needs."""
