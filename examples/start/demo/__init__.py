"""The program of `make demo`: shows the gain on this machine, proves equal losses, and draws a picture. See main.py."""
