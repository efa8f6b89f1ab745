"""A radix tree of prompts, with snapshots of the state after some of their prefixes.

An edge is a run of tokens, so a node is a prefix. A node may hold a snapshot: where prompts part, and where one ends.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.blocks.generation.engine.pages import PageAllocator

LEAST_SHARED = 16  # tokens that a snapshot must save to be worth its memory
SPACING = 512  # tokens between two snapshots of one prompt where no other prompt has parted from it yet
MEMORY_SHARE = 1 / 8  # of a CUDA device that snapshots take by default
MEMORY_BYTES = 2**28  # on other devices
_clock = itertools.count()


class Snapshot(NamedTuple):
    """The state of one row after `length` tokens: its tensors, without the slots of a cache that are still empty.

    pages: of caches, shared with the request that wrote them. In the last one it may write further tokens.
    """

    length: int
    tensors: list[Tensor]
    pages: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors)


@dataclass(eq=False)
class Node:
    """A prefix of `depth` tokens, the last ones of which are the edge from its parent.

    Args: users: number of requests whose prompt ends here and that have not ended.
    """

    edge: Tensor
    parent: "Node | None"
    depth: int
    children: dict[int, "Node"] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    users: int = 0
    last_use: int = 0

    def path(self) -> "Iterator[Node]":
        """Yield this node and its ancestors without the root, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Prompts and snapshots of their prefixes, the least recently used of which is dropped beyond `limit` bytes.

    Args: pages: of the caches, None without; page_bytes: their size. A page counts once for all snapshots.
    """

    def __init__(self, limit: int, pages: PageAllocator | None = None, page_bytes: int = 0) -> None:
        self.limit, self.bytes = limit, 0
        self._pages, self._page_bytes = pages, page_bytes
        self._held: Counter[int] = Counter()  # snapshots of each page
        self._root = Node(torch.empty(0, dtype=torch.int64, device="cpu"), None, 0)
        self._stored: set[Node] = set()

    def insert(self, tokens: Tensor) -> Node:
        """Add a prompt [T] on the CPU until `release`, and return its node.

        A prompt that is a prefix of another one also gets a node before its last token: its last logits need one token
        after a snapshot.
        """
        node, rest = self._root, tokens
        is_shared = False
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                is_shared = False
                child = Node(rest.clone(), node, node.depth + len(rest))  # a view would keep the whole prompt
                node.children[int(rest[0])] = child
            elif (common := _common_length(child.edge, rest)) < len(child.edge):
                is_shared, child = True, self._split(child, common)
            else:
                is_shared = True
            node, rest = child, rest[child.depth - node.depth :]
        node.users += 1
        if is_shared:
            self.at(node, node.depth - 1)
        return node

    def release(self, node: Node) -> None:
        """Forget a prompt that `insert` has returned; its snapshots stay."""
        node.users -= 1
        self._prune(node)

    def find(self, node: Node) -> Snapshot | None:
        """Return the snapshot of the longest proper prefix of a prompt."""
        for prefix in node.path():
            if prefix.snapshot is not None and prefix.depth < node.depth:
                prefix.last_use = next(_clock)
                return prefix.snapshot
        return None

    def boundary(self, node: Node, read: int) -> int:
        """Return where the piece of a prompt after `read` tokens should end, so that a snapshot can be taken."""
        depths = [prefix.depth for prefix in node.path() if prefix.depth > read and self._is_worth(prefix)]
        return min(depths, default=node.depth)

    def must_wait(self, node: Node, readers: Iterable[tuple[Node, int]]) -> bool:
        """Whether a prompt shares a prefix that another request is about to read and to store.

        Args: readers: the prompts that are being read, and how much of each has been read.
        """
        path = [prefix for prefix in node.path() if prefix.depth < node.depth]
        for reader, read in readers:
            others = set(reader.path())
            shared = next((prefix for prefix in path if prefix in others and self._is_worth(prefix)), None)
            if shared is not None and read < shared.depth:
                return True
        return False

    def wants(self, node: Node, read: int) -> bool:
        """Whether a snapshot of a prompt after `read` tokens should be stored."""
        for prefix in node.path():
            if prefix.depth == read:
                return self._is_worth(prefix)
            if prefix.depth < read:
                break
        return read - self._stored_below(node, read) >= SPACING

    def store(self, node: Node, snapshot: Snapshot) -> None:
        """Store the snapshot of a prefix of a prompt, unless it is larger than the limit."""
        prefix = self.at(node, snapshot.length)
        if prefix.snapshot is None and snapshot.bytes + len(snapshot.pages) * self._page_bytes <= self.limit:
            prefix.snapshot, prefix.last_use = snapshot, next(_clock)
            self.bytes += snapshot.bytes + sum(not self._held[page] for page in snapshot.pages) * self._page_bytes
            self._held.update(snapshot.pages)
            if self._pages is not None:
                self._pages.share(snapshot.pages)
            self._stored.add(prefix)
            while self.bytes > self.limit:
                self._drop(self._oldest(self._stored))
        self._prune(prefix)

    def make_room(self, count: int) -> bool:
        """Drop the least recently used snapshots until `count` pages are free; return False if that is impossible."""
        pages = self._pages
        assert pages is not None
        reclaimable = {page for page, held in self._held.items() if held == pages.users(page)}
        if pages.free + len(reclaimable) < count:
            return False
        while pages.free < count:
            holders = (node for node in self._stored if not reclaimable.isdisjoint(_pages(node)))
            self._drop(self._oldest(holders))
        return True

    @staticmethod
    def _oldest(nodes: Iterable[Node]) -> Node:
        return min(nodes, key=lambda node: node.last_use)

    def at(self, node: Node, depth: int) -> Node:
        """Return the node of the first `depth` tokens of a prompt, which is made if there is none."""
        if not depth:
            return self._root
        below = next(prefix for prefix in node.path() if prefix.parent is not None and prefix.parent.depth < depth)
        return below if below.depth == depth else self._split(below, depth - (below.depth - len(below.edge)))

    def _split(self, child: Node, length: int) -> Node:
        """Put a node after the first `length` tokens of the edge to a child."""
        parent = child.parent
        assert parent is not None
        node = Node(child.edge[:length].clone(), parent, parent.depth + length)
        parent.children[int(node.edge[0])] = node
        child.edge, child.parent = child.edge[length:].clone(), node
        node.children[int(child.edge[0])] = child
        return node

    def _is_worth(self, prefix: Node) -> bool:
        """Whether a prefix without a snapshot is long enough to need one."""
        if prefix.snapshot is not None:
            return False
        return prefix.depth - self._stored_below(prefix, prefix.depth) >= LEAST_SHARED

    def _stored_below(self, node: Node, depth: int) -> int:
        """Return the length of the longest stored prefix of fewer than `depth` tokens, or 0."""
        return next((p.depth for p in node.path() if p.depth < depth and p.snapshot is not None), 0)

    def _drop(self, node: Node) -> None:
        snapshot = node.snapshot
        assert snapshot is not None
        self._held.subtract(snapshot.pages)
        given_up = [page for page in snapshot.pages if not self._held[page]]
        for page in given_up:
            del self._held[page]
        self.bytes -= snapshot.bytes + len(given_up) * self._page_bytes
        if self._pages is not None:
            self._pages.release(snapshot.pages)
        node.snapshot = None
        self._stored.discard(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove nodes that neither a request nor a snapshot needs, and join edges at nodes with one child."""
        while node.parent is not None and not node.users and node.snapshot is None and len(node.children) < 2:
            parent = node.parent
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = torch.cat([node.edge, child.edge]), parent
                parent.children[int(child.edge[0])] = child
                return
            del parent.children[int(node.edge[0])]
            node = parent


def default_limit(device: torch.device) -> int:
    """Return the memory that snapshots take by default."""
    if device.type != "cuda":
        return MEMORY_BYTES
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)


def _pages(node: Node) -> tuple[int, ...]:
    return () if node.snapshot is None else node.snapshot.pages


def _common_length(a: Tensor, b: Tensor) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.int().argmax()) if bool(differs.any()) else length
