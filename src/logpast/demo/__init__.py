"""`logpast demo`: a memory model and its control, trained and scored side by side in a few minutes."""
