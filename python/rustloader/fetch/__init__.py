"""What options change about torch's fetchers, in workers and in the main process."""
