"""What the commands share: the user's loader in a process of its own, what goes wrong there, and figures as texts."""
