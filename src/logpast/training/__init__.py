"""Training: config and recipes, set-up, loop, optimizer, run folder, checkpoints, log."""
