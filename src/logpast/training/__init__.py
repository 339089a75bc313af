"""Training: config, optimiser and schedule, loop, checkpoint."""
