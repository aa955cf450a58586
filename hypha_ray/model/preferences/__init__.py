"""Training on preferences: losses, the policy's reference, and figures of rewards."""
