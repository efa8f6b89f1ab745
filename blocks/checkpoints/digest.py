"""A SHA-256 digest at the end of a file of torch.save, which is a ZIP archive: the digest is the archive's comment.

Readers of ZIP archives, torch.load too, ignore the comment. The digest covers every byte before it. One file holds
both, so that they are replaced together.
"""

import hashlib
import struct
from pathlib import Path
from typing import BinaryIO

_PREFIX = b"sha256:"
_COMMENT = len(_PREFIX) + 64  # bytes
_LENGTH = struct.Struct("<H")  # of the comment, in the last two bytes of an archive without one


def append_digest(path: Path) -> None:
    """Append the digest to a file that torch.save has written."""
    with path.open("r+b") as file:
        file.seek(-_LENGTH.size, 2)
        file.write(_LENGTH.pack(_COMMENT))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.write(_PREFIX + digest.encode())


def has_its_digest(file: BinaryIO) -> bool:
    """Whether the file ends with the digest of the bytes before it; the position is 0 afterwards."""
    left = max(0, file.seek(0, 2) - _COMMENT)
    file.seek(left)
    expected = file.read()
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(min(left, 1 << 20)):
        digest.update(block)
        left -= len(block)
    file.seek(0)
    return expected == _PREFIX + digest.hexdigest().encode()
