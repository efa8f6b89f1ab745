"""The revision of each tuned kernel: a number that a record of a launch table must name to be used.

Raise a kernel's revision when a change alters its performance or its numerics. tests/backends/test_revisions.py
compares the compiled kernels with stored hashes and reports a change; renaming a variable needs no new revision.
"""

REVISIONS = {
    "segment_chunks": 1,  # scan, reverse scan and combination together
    "prepare": 2,
    "scan": 1,
    "recompute": 1,
    "reverse": 1,  # with the sweep and the fused backward
    "gradients": 2,
    "decode": 1,  # with verify and commit
    "fused_step": 1,
}


def revision_of(kernel: str) -> int:
    """Return the revision of a kernel; 1 for one that is not in the list yet."""
    return REVISIONS.get(kernel, 1)
