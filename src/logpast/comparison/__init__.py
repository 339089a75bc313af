"""`logpast compare`: train and score several systems under equal conditions."""
