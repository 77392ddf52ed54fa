"""What a loader is asked to do: options, their kinds, and the settings of an iterator."""
