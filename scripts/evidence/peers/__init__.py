"""Parts of scripts/evidence/benchmark_peers.py: the models, the tools, the measurements, the table."""
