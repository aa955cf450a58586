"""Fleet of workers: slots, leases, states, batch times and trust."""
