"""Runs a model's forward pass with dropout off, and leaves no trace of it in the model or in random numbers."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Functions that return their first argument if dropout is off.
_DROPOUTS = {
    F.dropout,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.dropout_,
    torch.alpha_dropout_,
    torch.feature_dropout_,
    torch.feature_alpha_dropout_,
}
#: Functions that take a rate of dropout: by function, the rate's place.
_RATES: dict[Any, int] = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
#: Attributes of modules that are rates of dropout.
_RATE_NAMES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.dropout._DropoutNd, "p"),
    (nn.MultiheadAttention, "dropout"),
    (nn.RNNBase, "dropout"),
)
#: Containers with more items than this are no state that a forward pass changes.
_ITEMS = 1000


class _NoDropout(TorchFunctionMode):
    """``precision``: the coarsest type of numbers that a function gave, as the distance of 1 to the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RATES:
            place = _RATES[func]
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            self.precision = max(self.precision, torch.finfo(result.dtype).eps)
        return result


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[_NoDropout]:
    """Inside, dropout is off. Afterwards buffers, plain attributes and random generators are what they were.

    Plain attributes are numbers, strings, tensors, generators, and lists, dicts, sets and deques of such. Compiled
    models run uncompiled inside, so that nothing is compiled for these passes.
    """
    modules = list(model.modules())
    usual = vars(nn.Module())
    rates = [(m, name, vars(m)[name]) for m in modules for name in _rate_names(m)]
    buffers = [(m, name, value, _keeper(value)) for m in modules for name, value in m._buffers.items()]
    attributes = [(m, {n: (v, _keeper(v)) for n, v in vars(m).items() if n not in usual}) for m in modules]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    no_dropout = _NoDropout()
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(_other_generators())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(no_dropout)
            yield no_dropout
    finally:
        with torch.no_grad():
            for module, name, value, restore in buffers:
                restore()
                module._buffers[name] = value
            for module, kept in attributes:
                for name in [n for n in vars(module) if n not in usual and n not in kept]:
                    del vars(module)[name]  # made by the first call, and made again by the next
                for name, (value, restore) in kept.items():
                    restore()
                    vars(module)[name] = value
        for module, name, rate in rates:
            setattr(module, name, rate)


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def changed_buffers(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of the buffers whose values differ from ``before``."""
    return [name for name, value in model.named_buffers() if name in before and not _equal(value, before[name])]


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _rate_names(module: nn.Module) -> list[str]:
    return [
        name
        for kind, name in _RATE_NAMES
        if isinstance(module, kind) and isinstance(vars(module).get(name), float | int)
    ]


@contextmanager
def _other_generators() -> Iterator[None]:
    """Python's and NumPy's generators are afterwards what they were."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numbers)


def _nothing() -> None:
    pass


def _keeper(value: Any, depth: int = 0) -> Callable[[], Any]:
    """A function that makes ``value`` what it is now."""
    if isinstance(value, Tensor):
        return _tensor_keeper(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    numpy: Any = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray):
        saved = value.copy()
        return lambda: numpy.copyto(value, saved)
    if not isinstance(value, list | dict | set | deque) or len(value) > _ITEMS or depth > 3:
        return _nothing
    items = list(value.items() if isinstance(value, dict) else value)
    inner = [_keeper(item[1] if isinstance(value, dict) else item, depth + 1) for item in items]
    inner = [restore for restore in inner if restore is not _nothing]

    def restore_all() -> None:
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(items)
        for restore in inner:
            restore()

    return restore_all


def _tensor_keeper(value: Tensor) -> Callable[[], Any]:
    """Changes ``value`` only if it has changed: writing would disturb a graph that it is part of."""
    saved, version = value.detach().clone(), value._version if not value.is_inference() else -1

    def restore() -> None:
        if value.is_inference() or value._version != version:
            value.detach().copy_(saved)

    return restore
