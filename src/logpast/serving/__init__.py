"""`logpast serve`: an OpenAI-compatible completions endpoint."""
