"""Published measurements of GPU memory, beside what `oomprobe.SimulatedDevice` answers. Nothing here is fitted."""
