"""The bridge, which connects trainers outside Ray to a job. Needs neither ray nor torch."""
