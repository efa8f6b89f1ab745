"""Emulation of Gluon on torch operations, which runs the Hopper kernels on a CPU, one program at a time.

It emulates results, not the hardware: layouts have no effect. An asynchronous copy or product takes effect either when
it is issued or when it is waited for (`Timing`), and reads shared memory at that time; reading a pending product
raises. Each partition of warp_specialize is a thread, and waits for mbarriers block. Loads and stores outside every
tensor raise. Shared memory is NaN (integers: -1) until it is written.
"""

import contextlib
import functools
import importlib
import sys
import threading
import types

import ptx_on_cpu
import torch

TIMEOUT = 120.0  # seconds after which a wait for an mbarrier counts as a deadlock


class DType:
    """Gluon dtype that wraps a torch dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.itemsize = dtype.itemsize
        self.primitive_bitwidth = 8 * dtype.itemsize

    def __repr__(self) -> str:
        return str(self.torch)


class Pointer:
    """Dtype of a pointer."""

    def __init__(self, element_ty: DType) -> None:
        self.element_ty = element_ty

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pointer) and self.element_ty is other.element_ty

    def __hash__(self) -> int:
        return hash(self.element_ty)


DTYPES = {
    name: DType(getattr(torch, name))
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "bool")
}
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES.values()}


class Timing:
    """When asynchronous copies and products take effect: with `late` when they are waited for, else when issued."""

    late = False


def raw(x):
    return x.x if isinstance(x, Array) else x


class Array:
    """Tensor of a program; with a dtype `Pointer`, a tensor of byte addresses."""

    def __init__(self, x, dtype=None):
        self.x = x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
        self.pointer = dtype if isinstance(dtype, Pointer) else None

    @property
    def dtype(self):
        return self.pointer or BY_TORCH[self.x.dtype]

    @property
    def shape(self):
        return list(self.x.shape)

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if isinstance(dtype, Pointer):
            return Array(self.x, dtype)
        if self.pointer:
            return Array(self.x)
        assert not bitcast or self.x.dtype.itemsize == dtype.itemsize
        return Array(self.x.view(dtype.torch) if bitcast else self.x.to(dtype.torch))

    def __getitem__(self, at):
        return Array(self.x[at], self.pointer)

    def __index__(self):
        return int(self.x)

    __int__ = __index__

    def __bool__(self):
        return bool(self.x)

    def _moved(self, other, sign):
        # int64, because adding a zero-dimensional address to an int32 tensor gives int32
        steps = torch.as_tensor(raw(other)).to(torch.int64)
        return Array(self.x + sign * steps * self.pointer.element_ty.itemsize, self.pointer)

    def __add__(self, other):
        return self._moved(other, 1) if self.pointer else Array(self.x + raw(other))

    def __radd__(self, other):
        return self + other

    def __sub__(self, other):
        return self._moved(other, -1) if self.pointer else Array(self.x - raw(other))


class PendingProduct(Array):
    """Result of an asynchronous product. Reading it before the wait raises; accumulating onto it is allowed."""

    def __init__(self, compute):
        self.compute, self.pointer, self.finished = compute, None, False
        self.sum = None if Timing.late else compute()

    @property
    def x(self):
        assert self.finished, "a product was read before the wait for it"
        return self.sum

    def finish(self):
        self.sum, self.finished = self.compute() if self.sum is None else self.sum, True


def _operator(name):
    def apply(self, *others):
        result = getattr(self.x, name)(*(raw(other) for other in others))
        if result is NotImplemented:
            return result
        return Array(result)

    return apply


for _name in ("rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "and", "rand", "or", "xor", "rxor",
              "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):  # fmt: skip
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
Array.__hash__ = None


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @property
    def dtype(self):
        return BY_TORCH[self.x.dtype]

    @property
    def shape(self):
        return list(self.x.shape)

    def index(self, i):
        return Shared(self.x[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, int(start), length))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def reshape(self, shape):
        return Shared(self.x.view(shape))

    def reinterpret(self, dtype, shape, layout=None):
        return Shared(self.x.view(-1).view(dtype.torch).view(shape))

    def load(self, layout=None):
        return Array(self.x.clone())

    def store(self, value):
        assert value.x.dtype == self.x.dtype, (value.x.dtype, self.x.dtype)
        self.x.copy_(value.x.expand(self.x.shape))


class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.completed = 0


class Program:
    """State of the running program: its index, warps, mbarriers, and the first failure of a partition."""

    def __init__(self, pid, programs, warps):
        self.pid, self.programs, self.warps = pid, programs, warps
        self.barriers = {}
        self.changed = threading.Condition()
        self.failure = None


class _Thread(threading.local):
    program = None

    def begin(self, program, threads):
        self.program, self.threads = program, threads
        self.copies, self.groups, self.products = [], [], []


THREAD = _Thread()
MEMORY: dict[int, torch.Tensor] = {}  # address of the first byte -> bytes, of each tensor argument


def _tensors_at(at, mask, dtype):
    """Yield each tensor that contains masked addresses: its elements, which addresses, and their indices."""
    unresolved = mask.clone()
    for start, memory in MEMORY.items():
        hits = unresolved & (at >= start) & (at < start + memory.numel())
        if hits.any():
            offset = at[hits] - start
            assert not (offset % dtype.itemsize).any()
            yield memory.view(dtype.torch), hits, offset // dtype.itemsize
            unresolved &= ~hits
    assert not unresolved.any(), f"{int(unresolved.sum())} addresses are outside every tensor"


def _broadcast(pointer, *others):
    tensors = torch.broadcast_tensors(pointer.x, *(torch.as_tensor(raw(other)) for other in others))
    return [pointer.pointer.element_ty, *tensors]


def load(pointer, mask=True, other=0.0, **_):
    dtype, at, mask, other = _broadcast(pointer, mask, other)
    out = other.to(dtype.torch).clone()
    for memory, hits, indices in _tensors_at(at, mask, dtype):
        out[hits] = memory[indices]
    return Array(out)


def store(pointer, value, mask=True, **_):
    dtype, at, mask, value = _broadcast(pointer, mask, value)
    for memory, hits, indices in _tensors_at(at, mask, dtype):
        memory[indices] = value[hits].to(dtype.torch)


def copy(shared, pointer, mask=True):
    def complete():
        shared.x.copy_(load(pointer, mask).x.expand(shared.x.shape))

    THREAD.copies.append(complete)
    if not Timing.late:
        THREAD.copies.pop()()


def commit_group():
    THREAD.groups.append(THREAD.copies)
    THREAD.copies = []


def wait_group(outstanding):
    while len(THREAD.groups) > outstanding:
        for complete in THREAD.groups.pop(0):
            complete()


def where(condition, x, y):
    pointer = next((a.pointer for a in (x, y) if isinstance(a, Array) and a.pointer), None)
    return Array(torch.where(*(torch.as_tensor(raw(a)) for a in (condition, x, y))), pointer)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    def compute():
        assert a.x.dtype == b.x.dtype and a.x.dtype.itemsize in (2, 4), (a.x.dtype, b.x.dtype)
        product = a.x.float() @ b.x.float()
        return product + (acc.sum if isinstance(acc, PendingProduct) else acc.x) if use_acc else product

    product = PendingProduct(compute)
    THREAD.products.append(product)
    if not is_async:
        warpgroup_mma_wait(0)
    return product


def warpgroup_mma_wait(outstanding=0, deps=()):
    while len(THREAD.products) > outstanding:
        THREAD.products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


def inline_asm(text, constraints, args, dtype, is_pure=True, pack=1):
    """Emulate the kernels' inline PTX, recognised by its text."""
    x = args[0].x
    if "pattern" in text:
        return _apply_token_mask(text, x)
    if "prefetch" in text:
        return args[0]
    if "%laneid" in text and pack == 8:
        return Array(ptx_on_cpu.elementwise_n16(text, [a.x for a in args]))
    if pack == 16:
        several = isinstance(dtype, tuple)
        results = tuple(map(Array, ptx_on_cpu.elementwise(text, [a.x for a in args], len(dtype) if several else 1)))
        return results if several else results[0]
    if "@upper fma" in text:
        upper, factors, z, x, y = torch.broadcast_tensors(*(a.x for a in args))
        product = factors * z
        lower = y - product if "minus" in text else y + product
        return Array(torch.where(upper != 0, x + product, x)), Array(torch.where(upper != 0, y, lower))
    if "max.xorsign" in text:
        return Array(torch.maximum(x.abs(), args[1].x.abs()))
    if "mul.bf16x2" in text:
        return Array(x * args[1].x)
    if "shl.b32" in text or "cvt.rn.bf16x2" in text or "cvt.rn.f16x2" in text:
        return Array(x.to(dtype.torch))
    if "movmatrix" in text:  # transpose each block of 8 x 8
        rows, columns = x.shape
        return Array(x.view(rows // 8, 8, columns // 8, 8).permute(0, 3, 2, 1).reshape(rows, columns))
    if "add.f32 $30, $31, $62" in text:  # sums from each token on, for each half of the tokens
        return Array(x.view(2, 32, -1).flip(1).cumsum(1).flip(1).reshape(x.shape))
    if "add.f32 $31, $30, $63" in text:  # sums up to each token
        return Array(x.view(2, 32, -1).cumsum(1).reshape(x.shape))
    if "mov.b32 $31, $62" in text:  # each token gets the value of the token before it
        return Array(torch.nn.functional.pad(x.view(2, 32, -1)[:, :-1], (0, 0, 1, 0)).reshape(x.shape))
    if "mma.sync" in text:  # dot products of each warp's 16 rows of x with its 16 rows of y
        y, z = (a.x for a in args[1:])
        return Array(z + (x.float().view(-1, 16, 16) @ y.float().view(-1, 16, 16).mT).view(z.shape))
    assert "mov.b32 $0, $1" in text, text
    return args[0]


def _apply_token_mask(text, x):
    """Emulate the PTX of token_masks.py: collect the 8 x 8 block that each register of each warp keeps."""
    blocks = {"0": torch.zeros(8, 8, dtype=torch.bool), "-1": torch.ones(8, 8, dtype=torch.bool)}
    keep = torch.zeros(64, 64, dtype=torch.bool)
    bits, of_warp = 0, [""] * 4
    for line in text.splitlines():
        words = line.strip(";").replace(",", "").split()
        match words:
            case ["mov.b64", "bits", constant]:
                bits = int(constant, 16)
            case ["or.b32", name, "x", "y"]:
                blocks[name] = torch.tensor([bits >> b & 1 for b in range(64)], dtype=torch.bool).view(8, 8)
            case ["mov.b32", "m", name]:
                of_warp = [name] * 4
            case ["selp.b32", "m", name, "m", warp]:
                of_warp[int(warp.removeprefix("warp"))] = name
            case ["and.b32", out, _, "m"]:
                r = int(out.removeprefix("$"))
                for warp, name in enumerate(of_warp):
                    row, column = 16 * warp + r % 2 * 8, r // 2 * 8
                    keep[row : row + 8, column : column + 8] = blocks[name]
    return Array(torch.where(keep, x, torch.zeros((), dtype=x.dtype)))


def warp_specialize(partitions, warps, registers):
    program, failures = THREAD.program, []

    def run(function, args, threads):
        THREAD.begin(program, threads)
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)
            with program.changed:
                program.failure = error
                program.changed.notify_all()

    threads = [
        threading.Thread(target=run, args=(function, args, 32 * count))
        for (function, args), count in zip(partitions, [program.warps, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _barrier_state(barrier):
    return THREAD.program.barriers[barrier.x.data_ptr()]


def init_barrier(barrier, count):
    THREAD.program.barriers[barrier.x.data_ptr()] = Barrier(count)


def wait(barrier, phase):
    program, state = THREAD.program, _barrier_state(barrier)
    with program.changed:
        has_ended = program.changed.wait_for(lambda: program.failure or state.completed % 2 != int(phase), TIMEOUT)
    assert has_ended, "timeout in a wait for an mbarrier"
    if program.failure:
        raise RuntimeError("another partition failed")


def arrive(barrier, count=1, pred=True):
    if not pred:
        return
    program, state = THREAD.program, _barrier_state(barrier)
    with program.changed:
        state.pending -= count
        assert state.pending >= 0
        if state.pending == 0:
            state.pending, state.completed = state.count, state.completed + 1
            program.changed.notify_all()


def array_range(*bounds):
    """Replacement of range whose elements are Arrays, so that methods of run-time values work on them."""
    return (Array(i) for i in range(*(int(bound) for bound in bounds)))


def _allocate(dtype, shape, layout=None):
    return Shared(torch.full(shape, float("nan") if dtype.torch.is_floating_point else -1, dtype=dtype.torch))


class _Layout:
    """A layout. Layouts have no effect here."""

    def __init__(self, *args, **kwargs):
        pass

    @property
    def value(self):
        return self


def _unary(function):
    return lambda x: Array(function(torch.as_tensor(raw(x))))


def _binary(function):
    def apply(x, y, **_):
        x, y = raw(x), raw(y)
        dtype = next((a.dtype for a in (x, y) if isinstance(a, torch.Tensor)), None)
        return Array(function(torch.as_tensor(x, dtype=dtype), torch.as_tensor(y, dtype=dtype)))

    return apply


def _language() -> types.ModuleType:
    gl = types.ModuleType("language")
    gl.__dict__.update(DTYPES)
    gl.__dict__.update(
        constexpr=lambda x: x, pointer_type=Pointer, static_range=range, load=load, store=store, where=where,
        inline_asm_elementwise=inline_asm, warp_specialize=warp_specialize, allocate_shared_memory=_allocate,
        barrier=lambda: None, debug_barrier=lambda: None, shared_memory_descriptor=Shared,
        program_id=lambda axis: Array(THREAD.program.pid), num_programs=lambda axis: Array(THREAD.program.programs),
        arange=lambda first, last, layout=None: Array(torch.arange(first, last, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: Array(torch.zeros(shape, dtype=dtype.torch)),
        zeros_like=lambda x: Array(torch.zeros_like(raw(x))),
        full=lambda shape, value, dtype, layout=None: Array(torch.full(shape, 0, dtype=dtype.torch) + raw(value)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        cast=lambda x, dtype: (x if isinstance(x, Array) else Array(x)).to(dtype),
        cdiv=lambda x, y: -(-x // y),
        # facts for the compiler, which change no value
        max_contiguous=lambda x, values: x, multiple_of=lambda x, values: x,
        exp2=_unary(torch.exp2), sigmoid=_unary(torch.sigmoid), rsqrt=_unary(torch.rsqrt), log2=_unary(torch.log2),
        abs=_unary(torch.abs),
        maximum=_binary(torch.maximum), minimum=_binary(torch.minimum),
        sum=lambda x, axis: Array(x.x.sum(axis)), max=lambda x, axis: Array(x.x.amax(axis)),
        reshape=lambda x, shape: Array(x.x.reshape(shape)), permute=lambda x, order: Array(x.x.permute(order)),
        join=lambda x, y: Array(torch.stack([x.x, y.x], -1)), split=lambda x: tuple(map(Array, x.x.unbind(-1))),
        PropagateNan=types.SimpleNamespace(ALL=None),
    )  # fmt: skip
    gl.static_assert = lambda condition, *_: _assert(condition)
    for name in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "NVMMASharedLayout",
                 "SwizzledSharedLayout", "DistributedLinearLayout"):  # fmt: skip
        setattr(gl, name, _Layout)
    return gl


def _assert(condition):
    assert condition


KERNELS = set()
LAUNCHED: list[str] = []  # names of the kernels that ran


def _jit(function=None, **_):
    if function is None:
        return _jit
    function.__globals__["range"] = array_range
    function.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]
    KERNELS.add(function)
    return function


def _modules():
    """Return stand-ins for the kernels' imports from Triton."""
    gl = _language()

    def module(name, **names):
        result = types.ModuleType(name)
        result.__dict__.update(names)
        return result

    async_copy = module(
        "async_copy", async_load=copy, commit_group=commit_group, wait_group=wait_group,
        mbarrier_arrive=lambda barrier, increment_count=True: arrive(barrier, THREAD.threads),
    )  # fmt: skip
    mbarrier = module("mbarrier", MBarrierLayout=_Layout, init=init_barrier, wait=wait, arrive=arrive)
    hopper = module(
        "hopper", mbarrier=mbarrier, fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )  # fmt: skip
    gluon = module("gluon", jit=_jit, constexpr_function=lambda f: f, language=gl)
    return {
        "triton": module("triton", jit=_jit, language=gl),
        "triton.language": gl,
        "triton.language.extra": module("extra"),
        "triton.language.extra.cuda": module("cuda", gdc_launch_dependents=lambda: None, gdc_wait=lambda: None),
        "triton.experimental": module("experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia": module("nvidia"),
        "triton.experimental.gluon.language.nvidia.ampere": module("ampere", async_copy=async_copy),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }


def _row_blocks(x):
    """View a tile of 64 rows as [warps, 16, columns]."""
    return x.reshape(4, 16, -1)


def _round_causal(P, dtype, early):
    i, j = torch.arange(64)[:, None], torch.arange(64)[None, :]
    non_causal = (i // 8 == j // 8) & (i < j + int(early))
    return Array(torch.where(non_causal, 0.0, P.x).to(dtype.torch))


def _zero_except(warp):
    rows = torch.arange(64)[:, None] // 16 == warp
    return lambda x: Array(torch.where(rows, x.x, 0))


def _invert_diagonal_blocks(*blocks):
    diagonal = torch.stack([_row_blocks(block.x)[warp] for warp, block in enumerate(blocks)])
    lower = torch.where(torch.ones(16, 16, dtype=torch.bool).tril(-1), diagonal, 0).double()
    return Array(torch.linalg.inv(torch.eye(16, dtype=torch.float64) - lower).to(diagonal.dtype).reshape(64, 16))


def _multiply_warp_blocks(x, *others):
    return tuple(Array((_row_blocks(x.x).float() @ _row_blocks(y.x).float()).reshape(64, 16)) for y in others)


def _diagonal_blocks(*blocks):
    return Array(torch.cat([_row_blocks(block.x)[warp] for warp, block in enumerate(blocks)]))


def _split_operand(high, low):
    below = torch.ones(64, 64, dtype=torch.bool).tril(-1)
    identity = torch.eye(64, dtype=high.x.dtype)
    return Array(torch.where(below, high.x, -identity)), Array(torch.where(below, low.x, 0))


def _join_blocks(x, u, T0, T1):
    zero = torch.zeros_like(x.x)
    columns = (x, u, T0, T0), (zero, x, T1, T1), (zero, zero, x, u), (zero, zero, zero, x)
    return tuple(_diagonal_blocks(*(b if isinstance(b, Array) else Array(b) for b in blocks)) for blocks in columns)


# stand-ins of sm90/ptx.py
PTX = {
    "round_causal": _round_causal,
    "exp2_ftz": _unary(torch.exp2),
    "exp2_again": _unary(torch.exp2),
    "zero_except_warp_1": _zero_except(1),
    "zero_except_warp_3": _zero_except(3),
    "invert_diagonal_blocks": _invert_diagonal_blocks,
    "multiply_warp_blocks": _multiply_warp_blocks,
    "diagonal_blocks": _diagonal_blocks,
    "split_operand": _split_operand,
    "join_blocks": _join_blocks,
    "select_pairs": lambda upper, x, y, level: where(upper, x, y),
    "cumsum_by_warp": lambda x: Array(x.x.cumsum(-1)),
}
PACKAGE = "deltazoo.backends.triton.chunk.kernels"


DEVICE = "deltazoo.backends.triton.device"
GEMV = "deltazoo.backends.triton.gemv.kernels"
ATTENTION = "deltazoo.backends.triton.attention.kernels"
PACKAGES = (PACKAGE, DEVICE, GEMV, ATTENTION)


@functools.cache
def kernels(*names: str, package: str = PACKAGE) -> dict[str, types.ModuleType]:
    """Import the kernel modules of these names on the stand-ins; sys.modules and the packages are restored."""
    packages = [importlib.import_module(name) for name in PACKAGES]
    attributes = [dict(vars(package)) for package in packages]
    reloaded = tuple(f"{name}." for name in PACKAGES)
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(reloaded)}
    stand_ins = _modules()
    saved |= {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    stand_ins[f"{PACKAGE}.sm90.ptx"] = types.ModuleType("ptx")
    stand_ins[f"{PACKAGE}.sm90.ptx"].__dict__.update(PTX)
    sys.modules.update(stand_ins)
    try:
        return {f"{package}.{name}": importlib.import_module(f"{package}.{name}") for name in names}
    finally:
        for name in [n for n in sys.modules if n.startswith(reloaded) or n in stand_ins]:
            del sys.modules[name]
        sys.modules.update(saved)
        for package, values in zip(packages, attributes, strict=True):
            vars(package).clear()
            vars(package).update(values)


def _gluon_value(constant):
    """Convert a Triton dtype to its stand-in; return other constants unchanged."""
    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    return DTYPES[names[constant.name]] if type(constant).__name__ == "dtype" else constant


def launcher(fallback):
    """Return a launcher that runs kernels of `kernels` here and passes others to `fallback`."""

    def launch(kernel, tensors, traits, options=(4, 1, None)):
        if kernel not in KERNELS:
            return fallback(kernel, tensors, traits, options)
        names, warps = kernel.arg_names, options[0]

        def run_grid(programs, numbers):
            LAUNCHED.append(kernel.__name__)
            read = {name: tensors[name] for name in names if name in tensors}
            with _memory(_flat(read.values())):
                arguments = {name: _pointer(x) for name, x in read.items()}
                arguments |= {name: Array(torch.tensor(numbers[name])) for name in names if name in numbers}
                arguments |= {name: _gluon_value(traits[name]) for name in names if name in traits}
                for pid in range(programs):
                    THREAD.begin(Program(pid, programs, warps), 32 * warps)
                    kernel(**arguments)

        return run_grid

    return launch


def _flat(tensors):
    """Yield tensors, and those in NamedTuples."""
    for x in tensors:
        yield from x if isinstance(x, tuple) else (x,)


def _pointer(x):
    if isinstance(x, tuple):
        return type(x)(*map(_pointer, x))
    return None if x is None else Array(x.data_ptr(), Pointer(BY_TORCH[x.dtype]))


@contextlib.contextmanager
def _memory(tensors):
    for x in tensors:
        if x is not None and x.numel():
            span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            MEMORY[x.data_ptr()] = x.detach().as_strided((span,), (1,)).view(torch.uint8)
    try:
        yield
    finally:
        MEMORY.clear()
