"""The pages of the caches: which are free, and how many requests and snapshots use each of the others."""

from collections.abc import Iterable

PAGE_TOKENS = 64  # of a page: the largest tile of the kernels, so that a tile is in one page


class PageAllocator:
    """Pages 1 to `count`, each with the number of its users.

    A page is written by the request that took it, only at positions after those that any other user reads.
    """

    def __init__(self, count: int, tokens: int) -> None:
        self.count, self.tokens = count, tokens
        self._free = list(range(count, 0, -1))
        self._users = [0] * (count + 1)

    @property
    def free(self) -> int:
        """The number of pages without users."""
        return len(self._free)

    def pages_of(self, length: int) -> int:
        """Return the number of pages of a sequence."""
        return -(-length // self.tokens)

    def users(self, page: int) -> int:
        """Return the number of users of a page."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Take free pages, of which there must be as many."""
        assert count <= self.free
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each page."""
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each page; a page without users is free."""
        for page in pages:
            assert self._users[page]
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
