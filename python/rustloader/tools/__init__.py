"""Commands, and the tools with which they measure."""
