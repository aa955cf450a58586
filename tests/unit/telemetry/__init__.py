"""Unit tests of telemetry."""
