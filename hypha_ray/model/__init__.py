"""Models built or loaded, laid out flat, evaluated and exported."""
