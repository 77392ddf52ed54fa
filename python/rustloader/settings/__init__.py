"""The settings of a loader: options, their kinds, and the settings of an iterator."""
