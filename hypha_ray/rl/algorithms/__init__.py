"""Policy gradients as pure functions of tensors, each with its paper."""
