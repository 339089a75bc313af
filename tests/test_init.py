"""The names of the package."""

import logpast


def test_dir_lists_names_before_they_are_loaded() -> None:
    assert {"FilterBank", "LogMemory", "evaluate", "sweep", "compare"} <= set(dir(logpast))
