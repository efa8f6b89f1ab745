"""Operators and launches of the kernels of PaTH attention. Triton is imported when a kernel first runs.

B batch, T tokens, H query heads, G key-value heads, D key width, V value width, N sequences
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.autograd import differentiable_once
from deltazoo.backends.torch_ext.custom_op import cache_forward_signature, differentiate_exported, operator
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.triton.operands import ready, with_token_stride
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

BLOCK = 64  # tokens of a block at level 0
MAX_WIDTH = 128
MAX_WIDTH_FLOAT32 = 64  # wider tiles exceed the shared memory of a block


class PathLaunch(NamedTuple):
    """Launch parameters of a flash kernel: queries and keys of a tile, warps and stages."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2


class PathConfig(NamedTuple):
    """Launch parameters of the flash kernels, and warps of the others.

    Args: forward; queries, keys: the gradients of moved queries, and of moved keys. prepare, merge, move, gradients: of
        the preparation, of pairs of blocks, of moving rows, and of the gradients within a block.
    """

    forward: PathLaunch = PathLaunch()
    queries: PathLaunch = PathLaunch()
    keys: PathLaunch = PathLaunch()
    prepare: int = 4
    merge: int = 4
    move: int = 4
    gradients: int = 4


class PathOperands(NamedTuple):
    """The operands of the attention.

    q: [B, T, H, D]; k, w: [B, T, G, D]; v: [B, T, G, V], all of one dtype; beta: [B, T, G] float32.
    sums: [B, T, H] float64, the log gates added up over each sequence; None: no gates.
    cu_seqlens: [N + 1] int32, the bounds of packed sequences; then B = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    sums: Tensor | None
    cu_seqlens: Tensor | None


class _Launcher:
    """Launches kernels on the operands of one call."""

    def __init__(self, x: PathOperands, scale: float) -> None:
        from deltazoo.backends.triton.attention.kernels.path_tiles import PathTraits

        B, self.T, H, D = x.q.shape
        G, V = x.v.shape[2:]
        packed = x.cu_seqlens is not None
        self.N = x.cu_seqlens.shape[0] - 1 if x.cu_seqlens is not None else B
        self.packed, self.rows = packed, B * self.T
        self.gradient_dtype = torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32
        self.config = config_of(D, V, x.q.dtype)
        self.tensors: dict[str, Tensor | None] = {
            "w": ready(x.w), "beta": ready(x.beta), "sums": None if x.sums is None else ready(x.sums),
            "cu": x.cu_seqlens,
        }  # fmt: skip
        strides = {}
        for name in ("q", "k", "v"):
            self.tensors[name], strides[name] = with_token_stride(getattr(x, name).flatten(2))
        unit = math.gcd(8, *strides.values())
        self.levels = max(0, cdiv(self.T, BLOCK) - 1).bit_length()
        self.numbers = {f"{name}_stride": stride // unit for name, stride in strides.items()}
        self.numbers |= {"N": self.N, "T": self.T, "LEVELS": self.levels}
        precision = "tf32" if x.q.dtype != torch.float32 or tf32_allowed() else "tf32x3"
        widths = (max(64, power_of_two(D)), max(64, power_of_two(V)))
        self.traits = PathTraits(H, G, D, V, *widths, scale, x.sums is not None, unit, packed, precision, 0)

    def slots(self, size: int) -> int:
        """Return the number of slots for blocks of `size` tokens."""
        return self.T // size + self.N if self.packed else self.N * cdiv(self.T, size)

    def run(self, kernel: Any, programs: int, warps: int, *, launch: PathLaunch | None = None, **numbers: int) -> None:
        """Launch a kernel. Args: launch: of a flash kernel. numbers: other scalars by the kernel's parameters."""
        from deltazoo.backends.triton.runtime.launcher import launcher

        traits: dict[str, Any] = {"traits": self.traits}
        if launch is not None:
            traits |= {"BM": launch.queries, "BN": launch.keys}
        options = Options(warps, 1 if launch is None else launch.stages)
        launcher(kernel, self.tensors, traits, options)(programs, self.numbers | numbers)

    def prepare(self, backward: bool = False, whole: bool = False) -> None:
        """Compute the matrices of all blocks, and of the pairs of each level that rows move through.

        Args:
            backward: keep the inverses of the blocks, which the backward reads.
            whole: also compute the levels up to the whole sequence.
        """
        from deltazoo.backends.triton.attention.kernels.path_prepare import path_merge_kernel, path_prepare_kernel

        H, G, D = self.traits[:3]
        w, q = self.tensors["w"], self.tensors["q"]
        assert w is not None and q is not None
        matrices = w.dtype if w.dtype == torch.float32 else torch.float16
        levels = range(self.levels + 1 if whole else max(1, self.levels - 1))
        self.tree_slots = [self.slots(BLOCK << level) for level in levels]
        blocks = self.tree_slots[0]
        shapes = {"M": (BLOCK, BLOCK), "U": (BLOCK, D)} | ({"inverse": (BLOCK, BLOCK)} if backward else {})
        self.tensors["inverse"] = None
        for name, shape in shapes.items():
            self.tensors[name] = w.new_empty(blocks, G, *shape, dtype=matrices)
        self.tensors["tree"] = w.new_empty(sum(self.tree_slots), G, D, D, dtype=matrices)
        self.tensors["rows"] = q.new_empty(self.levels, self.rows, H, D)
        self.run(path_prepare_kernel, blocks * G, self.config.prepare)
        for level in levels[:-1]:
            below = sum(self.tree_slots[:level])
            programs = self.tree_slots[level + 1] * G
            self.run(path_merge_kernel, programs, self.config.merge, size=BLOCK << level, below=below)

    def move(self, **outputs: Tensor | None) -> None:
        """Move queries and keys, and with outputs attend within the blocks."""
        from deltazoo.backends.triton.attention.kernels.path_prepare import path_move_kernel

        self.tensors |= {"q_start": None, "k_end": None} | outputs
        self.run(path_move_kernel, self.tree_slots[0] * self.traits.H, self.config.move)

    def attend(self, kernel: Any, launch: PathLaunch, tile: int, heads: int) -> None:
        """Launch a flash kernel with a program for each tile of `tile` tokens and each head."""
        self.run(kernel, self.slots(tile) * heads, launch.warps, launch=launch)

    def differentiate_preparation(self) -> None:
        """Compute the gradients of the operands from those of the moved rows."""
        from deltazoo.backends.triton.attention.kernels import path_gradients as kernels

        H, G, D = self.traits[:3]
        tree = self.tensors["tree"]
        assert tree is not None
        self.tensors["d_tree"] = torch.empty_like(tree, dtype=torch.float32)
        # the kernel subtracts the slots of all levels, of which the tree has one less
        slots = sum(self.slots(BLOCK << level) for level in range(self.levels))
        blocks, merge = self.tree_slots[0], self.config.merge
        self.run(kernels.path_move_gradients_kernel, blocks * H, self.config.move, tree_slots=slots)
        spans = [(BLOCK << level, sum(self.tree_slots[:level]), count) for level, count in enumerate(self.tree_slots)]
        for level, (size, below, count) in enumerate(spans):
            plane = level * self.rows * H * D
            self.run(kernels.path_tree_gradients_kernel, count * G, merge, size=size, below=below, plane=plane)
        for (size, below, _), (*_, count) in reversed(list(itertools.pairwise(spans))):
            self.run(kernels.path_merge_gradients_kernel, count * G, merge, size=size, below=below)
        del self.tensors["rows"], self.tensors["d_rows"]  # most of the scratch memory
        widths = {"k": D, "v": self.traits.V, "w": D, "U": D, "M": BLOCK}
        for name, width in widths.items():
            self.tensors[f"d{name}_block"] = tree.new_empty(blocks, H, BLOCK, width, dtype=self.gradient_dtype)
        self.run(kernels.path_block_gradients_kernel, blocks * H, self.config.gradients)
        self.run(kernels.path_prepare_gradients_kernel, blocks * G, self.config.gradients)

    def whole_matrices(self) -> Tensor:
        """Return I - H_1 ... H_T of each sequence, [N, G, D, D] float32."""
        tree, cu = self.tensors["tree"], self.tensors["cu"]
        assert tree is not None
        top = tree[sum(self.tree_slots[:-1]) :]
        if cu is None:
            return top.float()
        slot = cu[:-1] // (BLOCK << self.levels) + torch.arange(self.N, device=cu.device)
        return torch.where((cu.diff() > 0)[:, None, None, None], top[slot].float(), 0.0)


def config_of(D: int, V: int, dtype: torch.dtype) -> PathConfig:
    """Return the launch parameters for the sizes."""
    if dtype == torch.float32:
        wide = PathLaunch(warps=8, stages=1)
        return PathConfig(wide, wide, wide, prepare=8, merge=8, move=8, gradients=8)
    if max(D, V) > 64:
        wide = PathLaunch(stages=1)
        return PathConfig(wide, wide, wide, merge=8, move=8, gradients=8)
    return PathConfig(PathLaunch(), PathLaunch(stages=3), PathLaunch(queries=128))


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from deltazoo.backends.triton.attention.kernels.path_flash import path_attention_kernel

    x, scale = PathOperands(*arguments[:-1]), arguments[-1]
    o, lse = _forward_fake(*arguments)
    if x.cu_seqlens is not None:  # rows after the last sequence
        o.zero_()
    with torch.cuda.device_of(x.q):
        run = _Launcher(x, scale)
        run.prepare()
        run.move(o_local=torch.empty_like(o, dtype=torch.float32), lse_local=torch.empty_like(lse))
        run.tensors |= {"o": o, "lse": lse}
        launch = run.config.forward
        run.attend(path_attention_kernel, launch, launch.queries, run.traits.H)
    return o, lse


def _backward(*arguments: Any) -> list[Tensor]:
    from deltazoo.backends.triton.attention.kernels import path_flash as kernels

    *operands, o, lse, d_o, scale = arguments
    x = PathOperands(*operands)
    gradients = _backward_fake(*arguments)
    if x.cu_seqlens is not None:
        for gradient in gradients:
            gradient.zero_()
    d_q, d_k, d_v, d_w, d_beta = gradients[:5]
    d_sums = torch.zeros_like(lse) if x.sums is not None else None
    with torch.cuda.device_of(x.q):
        run = _Launcher(x, scale)
        run.prepare(backward=True)
        run.move(o_local=None, lse_local=None)
        rows = run.tensors["rows"]
        assert rows is not None
        run.tensors |= {
            "o": o, "lse": lse, "d_o": ready(d_o), "delta": torch.empty_like(lse), "d_sums": d_sums, "d_q": d_q,
            "d_k": d_k, "d_v": d_v, "d_w": d_w, "d_beta": d_beta, "d_rows": torch.empty_like(rows),
        }  # fmt: skip
        del rows
        queries, keys = run.config.queries, run.config.keys
        run.attend(kernels.path_query_gradients_kernel, queries, queries.queries, run.traits.H)
        run.attend(kernels.path_key_gradients_kernel, keys, keys.keys, run.traits.G)
        run.differentiate_preparation()
    if d_sums is not None:
        gradients[5].copy_(d_sums)
    return gradients


def _prefill(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from deltazoo.backends.triton.attention.kernels.path_flash import path_attention_kernel
    from deltazoo.backends.triton.attention.kernels.path_past import path_past_kernel

    *operands, cache_k, cache_v, seen, past_bias, scale = arguments
    x = PathOperands(*operands)
    o, k_end, _ = _prefill_fake(*arguments)
    if x.cu_seqlens is not None:
        o.zero_()
    lse = o.new_empty(o.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(x.q):
        run = _Launcher(x, scale)
        run.prepare(whole=True)
        outputs = {"q_start": torch.empty_like(x.q, memory_format=torch.contiguous_format), "k_end": k_end}
        run.move(o_local=torch.empty_like(o, dtype=torch.float32), lse_local=torch.empty_like(lse), **outputs)
        H, launch = run.traits.H, run.config.forward
        run.tensors |= {
            "cache_k": ready(cache_k), "cache_v": ready(cache_v), "seen": seen,
            "past_bias": None if past_bias is None else ready(past_bias), "o": o, "lse": lse,
        }  # fmt: skip
        past = PathLaunch(warps=launch.warps, stages=1)
        run.traits = run.traits._replace(CACHE=cache_k.shape[3])
        run.run(path_past_kernel, run.slots(past.queries) * H, past.warps, launch=past, S=cache_k.shape[1])
        run.traits = run.traits._replace(CACHE=0)
        run.attend(path_attention_kernel, launch, launch.queries, H)
        return o, k_end, run.whole_matrices()


def _prefill_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, cache_k = PathOperands(*arguments[:7]), arguments[7]
    (B, T, H, D), (G, V) = x.q.shape, x.v.shape[2:]
    o, k_end = x.q.new_empty(B, T, H, V), x.q.new_empty(B, T, G, D, dtype=torch.float32)
    return o, k_end, x.q.new_empty(cache_k.shape[0], G, D, D, dtype=torch.float32)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    x = PathOperands(*arguments[:-1])
    B, T, H, _ = x.q.shape
    return x.q.new_empty(B, T, H, x.v.shape[-1]), x.q.new_empty(B, T, H, dtype=torch.float32)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    x = PathOperands(*arguments[:-4])
    return [t.new_empty(t.shape) for t in x[:6] if t is not None]


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? sums, Tensor? cu_seqlens"
_forward_op = operator(
    f"triton_path_attention({_OPERANDS}, float scale) -> (Tensor, Tensor)",
    _forward,
    compiled_ahead(_forward, _forward_fake),
    any_layout=True,
)
_backward_op = operator(
    f"triton_path_attention_backward({_OPERANDS}, Tensor o, Tensor lse, Tensor d_o, float scale) -> Tensor[]",
    _backward,
    compiled_ahead(_backward, _backward_fake),
    any_layout=True,
)


_prefill_op = operator(
    f"triton_path_prefill({_OPERANDS}, Tensor cache_k, Tensor cache_v, Tensor seen, Tensor? past_bias, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _prefill,
    compiled_ahead(_prefill, _prefill_fake),
    any_layout=True,
)


class PathPast(NamedTuple):
    """Cached tokens of each sequence.

    k: [N, S, G, D or more], keys in the first D channels; v: [N, S, G, V]; seen: [N] int64, the slots in use; bias:
    [N, S, H] float32, the log gates from each token to the start of the call; None: no gates.
    """

    k: Tensor
    v: Tensor
    seen: Tensor
    bias: Tensor | None


def path_prefill(x: PathOperands, past: PathPast, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attend to cached and new tokens. No gradients.

    Returns: o [B, T, H, V]; the new keys multiplied by the matrices of all later tokens, [B, T, G, D] float32; E [N, G,
        D, D] float32: the new tokens multiply an earlier key k by I - E.
    """
    return _prefill_op(*x, *past, scale)


def path_attention(x: PathOperands, scale: float) -> Tensor:
    """Run the kernels; differentiable once. Returns: o [B, T, H, V]."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        o: Tensor = _PathAttention.apply(*x, scale)[0]
        return o
    return _forward_op(*x, scale)[0]


@cache_forward_signature
class _PathAttention(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = _forward_op(*arguments)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:-1], *output)
        ctx.scale = inputs[-1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_o: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward_op(*ctx.saved_tensors, d_o, ctx.scale)
        return (*gradients, *[None] * (8 - len(gradients)))


differentiate_exported("triton_path_attention", lambda *arguments: _PathAttention.apply(*arguments))
