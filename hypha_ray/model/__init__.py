"""Models: building and loading them, tasks and losses, flat layout, evaluation and export."""
