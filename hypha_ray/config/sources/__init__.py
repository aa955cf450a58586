"""Assignments to keys of the job file, read from TOML documents and flags."""
