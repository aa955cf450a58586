"""Tests of hypha_ray."""
