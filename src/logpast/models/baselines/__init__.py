"""Other models with a long context, one module per model."""
