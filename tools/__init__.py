"""Tools for this repository; not part of the wheel."""
