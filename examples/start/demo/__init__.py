"""The demo of `make demo`: the gain on this machine, the proof, and a picture. main.py is the program."""
