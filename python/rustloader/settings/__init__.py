"""The settings of a loader: its options, their values, and the resolved settings of an iterator."""
