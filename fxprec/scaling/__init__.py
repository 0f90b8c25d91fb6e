"""The parts of the loss scaler: each loss's scale, the gradients of an optimizer, ranks that agree, the floor."""
