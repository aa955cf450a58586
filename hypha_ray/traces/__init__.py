"""Spans of OpenTelemetry: the work of all processes for a round, as one tree."""
