"""Parts of scripts/benchmark_peers.py: the models, the tools, the measurements, the table."""
