"""Other systems with a long past, one file per system."""
