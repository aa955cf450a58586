"""Training with torch inside the actor."""
