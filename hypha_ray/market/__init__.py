"""Needs of a job, and the leases of placement groups that satisfy them."""
