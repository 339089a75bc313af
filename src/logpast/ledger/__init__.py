"""The ledger: one JSON row per scored run; reading, querying and plotting rows (`logpast results`)."""
