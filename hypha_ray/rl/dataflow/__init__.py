"""Dataflow of an island: samples, a graph of calls, and requests that take samples through it. No torch, no Ray."""
