"""`logpast paper`: the tables and figures of the paper, and our results next to them."""
