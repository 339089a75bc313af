"""Model + text -> the loss of every token, and the metrics made of it."""
