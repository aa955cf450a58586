"""Training by a process outside of Ray, over the bridge."""
