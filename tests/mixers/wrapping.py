"""Linear maps that are not plain, put in place of a model's own: LoRA, packed weights, weights loaded for each call."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.torch_ext.devices import DeviceSpec


class Adapted(nn.Module):
    """LoRA around a linear map: y = base(x) + B A x."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features
        dtype = base.weight.dtype
        self.A = nn.Parameter(torch.randn(2, base.in_features, dtype=dtype) * base.in_features**-0.5)
        self.B = nn.Parameter(0.3 * torch.randn(base.out_features, 2, dtype=dtype))

    @property
    def weight(self) -> Tensor:
        """The weight without the adapter, as peft's layers return it."""
        return self.base.weight

    def merged(self) -> Tensor:
        return (self.base.weight + self.B @ self.A).detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.A.mT @ self.B.mT


class Wrapped(nn.Module):
    """A linear map inside another module, which has no attributes but its sizes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.in_features, self.out_features = linear, linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class AdaptedEmbedding(nn.Module):
    """LoRA around an embedding; like peft's layer it has no `num_embeddings`."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base = base
        rows, width = base.weight.shape
        self.A = nn.Parameter(torch.randn(2, rows, dtype=base.weight.dtype))
        self.B = nn.Parameter(torch.randn(width, 2, dtype=base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def merged(self) -> Tensor:
        return (self.base.weight + (self.B @ self.A).mT).detach()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens) + F.embedding(tokens, self.A.mT) @ self.B.mT


class Packed(nn.Linear):
    """A linear map whose weight is packed to bytes, as by bitsandbytes: 8 bits with a scale for each output."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        weight = base.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
        packed = (weight / self.scale).round().to(torch.int8).view(torch.uint8)
        self.weight = nn.Parameter(packed.reshape(-1, 1), requires_grad=False)

    def merged(self) -> Tensor:
        return self.weight.view(torch.int8).view(self.out_features, self.in_features) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.merged().to(x.dtype), self.bias)


class Product(Tensor):
    """A weight of another class, as torchao's: it allows its own product and nothing else that reads its values."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.as_subclass(Tensor), *bias, **(kwargs or {}))
        if function in (Tensor.new_zeros, Tensor.to, torch.stack, torch.cat, Tensor.unflatten, torch.einsum):
            raise NotImplementedError(f"{function} of a packed weight")
        return super().__torch_function__(function, types, args, kwargs)


def with_product_weight(linear: nn.Linear) -> nn.Linear:
    """Return the linear map with a weight of the class `Product`."""
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = nn.Parameter(weight.as_subclass(Product), requires_grad=False)
    return linear


def replace(
    module: nn.Module, wrap: Callable[[Any], nn.Module], kind: type[nn.Module] = nn.Linear, prefix: str = ""
) -> dict[str, nn.Module]:
    """Replace every submodule of this class or a subclass of it. Returns: the new modules by name."""
    replaced: dict[str, nn.Module] = {}
    for name, child in list(module.named_children()):
        if isinstance(child, kind):
            replaced[prefix + name] = module._modules[name] = wrap(child)
        else:
            replaced |= replace(child, wrap, kind, f"{prefix}{name}.")
    return replaced


@torch.no_grad()
def merge(module: nn.Module, replaced: dict[str, Any]) -> None:
    """Set the weights of a module without wrappers to those that the wrappers of another one compute with."""
    for name, wrapper in replaced.items():
        module.get_submodule(name).weight.copy_(wrapper.merged())  # type: ignore[operator, union-attr]


def called_on_a_gpu(modules: Iterable[nn.Module], call: Callable[[], Any]) -> set[nn.Module]:
    """Run a call on meta tensors as on an H200, without gradients. Returns: those of the modules that it calls."""
    from deltazoo.backends.triton.runtime.simulation import simulated_launches

    called: set[nn.Module] = set()
    hooks = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in modules]
    with torch.no_grad(), simulated_launches(DeviceSpec.named("NVIDIA H200")):
        call()
    for hook in hooks:
        hook.remove()
    return called


def offload(module: nn.Module) -> None:
    """Keep parameters on the meta device, and load those of each submodule for its calls, as accelerate's hooks do."""
    for submodule in module.modules():
        loaded = {name: x for name, x in submodule._parameters.items() if x is not None}
        if not loaded:
            continue
        absent = {name: nn.Parameter(x.detach().to("meta"), x.requires_grad) for name, x in loaded.items()}
        submodule._parameters.update(absent)

        def forward(
            *arguments: Any,
            submodule: nn.Module = submodule,
            loaded: Any = loaded,
            absent: Any = absent,
            inner: Callable[..., Any] = submodule.forward,
            **options: Any,
        ) -> Any:
            submodule._parameters.update(loaded)
            try:
                return inner(*arguments, **options)
            finally:
                submodule._parameters.update(absent)

        vars(submodule)["forward"] = forward
        vars(submodule)["_hf_hook"] = SimpleNamespace(execution_device="cpu")
