"""Command lines of job scripts: entry point, options, help and standard streams."""
