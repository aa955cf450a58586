"""Benchmarks over throttled links between network namespaces."""
