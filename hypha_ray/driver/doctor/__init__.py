"""Examination of this machine and of the cluster that it belongs to."""
