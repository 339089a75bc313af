"""GPU kernels that replace standard layers in training, and the one place that decides when they do (`dispatch`)."""
