"""What the package needs of the system, of Python and of torch."""
