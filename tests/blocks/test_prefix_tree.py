"""The radix tree of prompts finds the longest stored prefix, and keeps only what prompts and snapshots need."""

import random

import torch

from deltazoo.blocks.generation.engine.prefix_tree import LEAST_SHARED, Node, PrefixTree, Snapshot


def text(node: Node) -> list[int]:
    return [token for prefix in reversed(list(node.path())) for token in prefix.edge.tolist()]


def snapshot(length: int, size: int = 10) -> Snapshot:
    return Snapshot(length, [torch.zeros(size, dtype=torch.uint8)])


def all_nodes(tree: PrefixTree) -> list[Node]:
    nodes = [tree._root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def test_random_prompts_find_the_longest_stored_prefix():
    rng, tree = random.Random(0), PrefixTree(10**6)
    open_prompts: list[tuple[list[int], Node]] = []
    stored: dict[tuple[int, ...], Snapshot] = {}
    for _ in range(400):
        if open_prompts and rng.random() < 0.4:
            prompt, node = open_prompts.pop(rng.randrange(len(open_prompts)))
            length = rng.randint(1, len(prompt))
            if rng.random() < 0.3:
                new = snapshot(length)
                tree.store(node, new)
                stored.setdefault(tuple(prompt[:length]), new)
            tree.release(node)
        else:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            open_prompts.append((prompt, tree.insert(torch.tensor(prompt))))
        for prompt, node in open_prompts:
            assert text(node) == prompt
            assert node.depth == len(prompt)
            known = [n for n in range(1, len(prompt)) if tuple(prompt[:n]) in stored]
            found = tree.find(node)
            assert found is (stored[tuple(prompt[: known[-1]])] if known else None)
    for _, node in open_prompts:
        tree.release(node)
    leaves = [node for node in all_nodes(tree) if not node.children]
    assert all(leaf.snapshot is not None for leaf in leaves)
    assert tree.bytes == 10 * len(stored)


def test_the_least_recently_used_snapshots_are_dropped():
    tree = PrefixTree(25)
    prompts = [torch.full((20,), n) for n in range(3)]
    nodes = [tree.insert(prompt) for prompt in prompts]
    tree.store(nodes[0], snapshot(19))
    tree.store(nodes[1], snapshot(19))
    assert tree.find(nodes[0]) is not None  # now the most recently used one
    tree.store(nodes[2], snapshot(19))
    assert [tree.find(node) is not None for node in nodes] == [True, False, True]
    tree.store(nodes[1], snapshot(18, size=26))  # larger than all memory
    assert tree.find(nodes[1]) is None
    assert tree.bytes == 20
    for node in nodes:
        tree.release(node)
    assert len(all_nodes(tree)) == 3


def test_pieces_end_where_prompts_part_and_later_ones_wait():
    tree, shared = PrefixTree(10**6), torch.arange(LEAST_SHARED)
    first = tree.insert(torch.cat([shared, torch.tensor([90, 91, 92])]))
    assert tree.boundary(first, 0) == first.depth
    second = tree.insert(torch.cat([shared, torch.tensor([93])]))
    assert tree.boundary(first, 0) == LEAST_SHARED
    assert tree.boundary(first, LEAST_SHARED) == first.depth
    assert tree.must_wait(second, [(first, 0)])
    assert not tree.must_wait(second, [(first, LEAST_SHARED)])
    assert tree.wants(first, LEAST_SHARED)
    tree.store(first, snapshot(LEAST_SHARED))
    assert not tree.must_wait(second, [(first, 0)])
    assert tree.boundary(first, 0) == first.depth
    short = [tree.insert(torch.tensor([200, 201, 202 + n])) for n in range(2)]
    assert not tree.must_wait(short[1], [(short[0], 0)])  # two tokens are not worth a snapshot
