"""Memory that is free and yet not given back."""

import ctypes


def trim_heap() -> None:
    """Give the free parts of the heap back to the system, where its C library can (glibc).

    Batches of ever other lengths leave holes between what PyTorch's kernels for CPUs keep of each
    shape. New tensors do not fit into them, and a process of some 500 MiB was seen to grow to 11
    GiB in some thousand steps.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # Another C library; TypeError is Windows'.
        return
    trim(ctypes.c_size_t(0))
