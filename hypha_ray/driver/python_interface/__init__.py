"""Training from Python, in the background and with callbacks, and errors without flags."""
