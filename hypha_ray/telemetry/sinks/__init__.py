"""Sinks of records and events: files, console, and services."""
