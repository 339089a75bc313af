"""`logpast sweep`: train and score every cell of a grid of settings."""
