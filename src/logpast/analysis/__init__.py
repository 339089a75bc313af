"""`logpast analyze`: where a model's loss lies and how much of its past it uses."""
