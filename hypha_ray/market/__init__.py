"""What a job needs of machines, and the leases of placement groups that give it."""
