"""The commands, and the measuring tools that they use."""
