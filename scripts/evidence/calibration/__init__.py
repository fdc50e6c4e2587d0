"""Published measurements of GPU memory, compared with `oomprobe.SimulatedDevice`. Nothing here is fitted."""
