"""Tasks: their table, inputs and labels, masking, and how a model completes its task."""
