"""Parts of scripts/benchmark_peers.py: what is trained, the tools, how their answers are judged, the table."""
