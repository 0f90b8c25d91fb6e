"""What is measured: models and their data, kernels at a shape, fused regions."""
