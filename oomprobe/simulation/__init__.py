"""What the simulated device is made of: a GPU that is not there, followed byte by byte."""
