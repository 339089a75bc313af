"""Work in a thread."""

import threading

import pytest

from logpast.util.threads import in_thread


def test_the_result_or_the_exception_of_the_work_is_handed_over() -> None:
    assert in_thread(lambda: 5).result() == 5
    with pytest.raises(KeyError, match="absent"):
        in_thread(lambda: {}["absent"]).result()


def test_the_thread_does_not_keep_the_process_from_ending() -> None:
    assert in_thread(lambda: threading.current_thread().daemon).result()
