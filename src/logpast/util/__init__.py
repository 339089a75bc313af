"""Helpers that every package may use: errors, files, progress, environment, validation, serialization, precision."""
