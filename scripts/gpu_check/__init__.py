"""What scripts/gpu-check runs (check.py), and the parts of its check; tests and other measurements use some of them."""
