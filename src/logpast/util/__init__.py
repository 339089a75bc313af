"""Small helpers that every layer may use: errors, files, progress, environment, validation of settings."""
