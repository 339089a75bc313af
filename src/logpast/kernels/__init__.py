"""GPU kernels for training, and the one place that decides when they replace standard layers (`dispatch`)."""
