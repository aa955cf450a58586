"""The commit log, the only truth about a run, and its snapshots."""
