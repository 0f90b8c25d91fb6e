"""Static capture: torch.fx tracing that notices what it must not do, and guards for what it read."""
