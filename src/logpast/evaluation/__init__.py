"""From a model and a text to the loss of every token, and to metrics."""
