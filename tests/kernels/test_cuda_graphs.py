"""The capture itself needs a GPU: see tests/test_gpu.py."""

import gc

import pytest

from logpast.kernels import cuda_graphs


def test_garbage_collection_is_off_during_a_capture_and_on_afterwards() -> None:
    assert gc.isenabled()
    with cuda_graphs._gc_off():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_collection_is_on_again_after_a_failed_capture() -> None:
    with pytest.raises(RuntimeError), cuda_graphs._gc_off():
        raise RuntimeError
    assert gc.isenabled()


def test_garbage_collection_stays_off_if_it_was_off() -> None:
    gc.disable()
    try:
        with cuda_graphs._gc_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
