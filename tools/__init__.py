"""Tools for this repository alone; not part of the wheel."""
