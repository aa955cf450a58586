"""Metrics and events: files, console, Prometheus, OpenTelemetry, Aim, plots."""
