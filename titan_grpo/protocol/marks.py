"""Marks: where a transfer reports its progress. A receiver sends MOVED at each, in order, and the
lane waits for each. Pure."""

MOST_MARKS = 512
"""Most marks of a transfer. One thread of the trainer takes those of all servers: with one for each
bucket of 64 MiB, a 671B model and 256 servers would keep it busy for minutes a version."""


def mark_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """Return the bytes between two marks: as few whole buckets as give MOST_MARKS at most.

    >>> mark_bytes(1024 << 20, 1 << 20) >> 20, mark_bytes(1025 << 20, 1 << 20) >> 20
    (2, 3)
    """
    return bucket_bytes * -(-total_bytes // (MOST_MARKS * bucket_bytes))


def marks(total_bytes: int, bucket_bytes: int) -> tuple[int, ...]:
    """Return the marks, in bytes.

    >>> marks(10, 4)
    (4, 8, 10)
    """
    step = mark_bytes(total_bytes, bucket_bytes)
    return (*range(step, total_bytes, step), total_bytes)
