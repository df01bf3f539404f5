"""Runs a model's forward pass with dropout off, and leaves no trace of it in the model or in random numbers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
}
_IN_PLACE = {torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS or func in _IN_PLACE:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, dropout is off. Afterwards buffers, plain attributes and torch's generators are what they were.

    Plain attributes are numbers, strings, tensors, and lists, dicts, sets and deques of such.
    """
    modules = list(model.modules())
    rates = [(m, name, vars(m)[name]) for m in modules for name in ("p", "dropout") if _is_rate(m, name)]
    buffers = [(m, name, value, _clone(value)) for m in modules for name, value in m._buffers.items()]
    usual = vars(nn.Module())
    states = [(m, {n: (v, _saved(v)) for n, v in vars(m).items() if n not in usual and _keeps(v)}) for m in modules]
    names = {id(m): set(vars(m)) for m in modules}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        with torch.random.fork_rng(devices=devices), _NoDropout():
            yield
    finally:
        with torch.no_grad():
            for module, name, value, saved in buffers:
                module._buffers[name] = _restored(value, saved)
            for module, state in states:
                for name in [n for n in vars(module) if n not in names[id(module)]]:
                    del vars(module)[name]  # made by the first call, and made again by the next
                for name, (value, saved) in state.items():
                    vars(module)[name] = _restored(value, saved)
        for module, name, rate in rates:
            setattr(module, name, rate)


def changed_buffers(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Names of the buffers whose values differ from ``before``."""
    return [
        name
        for name, value in model.named_buffers()
        if name in before and not torch.equal(torch.nan_to_num(value), torch.nan_to_num(before[name]))
    ]


def _is_rate(module: nn.Module, name: str) -> bool:
    kind = nn.modules.dropout._DropoutNd if name == "p" else (nn.MultiheadAttention, nn.RNNBase)
    return isinstance(module, kind) and isinstance(vars(module).get(name), float | int)


def _keeps(value: Any) -> bool:
    if isinstance(value, list | dict | set | deque):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= 1000 and all(isinstance(item, (*_PLAIN, Tensor)) for item in items)
    return isinstance(value, (*_PLAIN, Tensor))


def _clone(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value)


def _restored(value: Any, saved: Any) -> Any:
    if isinstance(value, Tensor) and saved is not None:
        if not torch.equal(value, saved) or value.shape != saved.shape:
            value.detach().copy_(saved)
    elif isinstance(value, list):
        value[:] = saved
    elif isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    elif isinstance(value, deque):
        value.clear()
        value.extend(saved)
    return value
