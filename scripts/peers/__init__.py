"""Parts of scripts/benchmark_peers.py: what is probed, who probes it, and how their answers are judged."""
