"""What is done with gradients: optimizers, their schedules and their state, whoever has the gradients."""
