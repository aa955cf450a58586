"""What `jobs/bench.py` measures, a file for each part of the system."""
