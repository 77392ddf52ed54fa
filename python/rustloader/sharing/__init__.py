"""Objects that the processes of a machine share."""
