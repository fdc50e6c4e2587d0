"""Byte-accurate simulation of GPU memory, used by `oomprobe.devices.simulated`."""
