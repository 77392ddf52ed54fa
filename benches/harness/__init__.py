"""What the programs of benches/ share: their command line, their tables, and measurements in processes of their own."""
