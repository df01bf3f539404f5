"""Faults that NestPipeline had, put back one at a time, to see that the fuzzer finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from nestpipe.adoption import adopted, batches, collections, keyed, lookups, outputs, pipeline, separable
from nestpipe.adoption.losses import Losses
from nestpipe.adoption.stream import Stream
from nestpipe.engine import dense_part, gradients, source
from nestpipe.engine.gradients import Gradients


@contextlib.contextmanager
def _put(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Each (object, attribute, value) in place of what is there."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _lengths_only() -> AbstractContextManager[None]:
    """Ids that the model changes are found only if their number changes."""

    def equal(one: Any, other: Any) -> bool:
        return one.flat.shape == other.flat.shape and one.counts.shape == other.counts.shape

    return _put((lookups, "_equal", equal), (keyed.HandedOut, "untouched", lambda self: True))


def _last_field_wins() -> AbstractContextManager[None]:
    """Of two fields with one key, both get the rows of the last."""
    rows = lookups.FromEngine.rows

    def of_the_last(self: Any, collection: str, slots: Any, asked: Any) -> Any:
        paths = [one.path for one in self._handed if set(asked.keys()) <= set(one.keyed.keys())]
        last = next((one.keyed for one in self._handed if paths and one.path == paths[-1]), asked)
        same = len(last.values()) == len(asked.values()) and self._part.extra.keys() >= set()
        try:
            return rows(self, collection, slots, last if same else asked)
        except ValueError:
            return rows(self, collection, slots, asked)

    return _put((lookups.FromEngine, "rows", of_the_last))


def _no_broadcast() -> AbstractContextManager[None]:
    return _put((dense_part, "_start_as_on_rank_0", lambda model, exchange: None))


def _constants_of_the_first_batch() -> AbstractContextManager[None]:
    """Numbers, strings and None stay those of the first batch."""
    to_batch = batches.BatchFormat.to_batch

    def frozen(self: Any, batch: Any, first_id: int, reads: Any) -> Any:
        made = to_batch(self, batch, first_id, reads)
        kept = vars(self).setdefault("kept", {})
        leaves = dict(made.form.leaves)
        for path, leaf in leaves.items():
            if isinstance(leaf, float | str | None):
                leaves[path] = kept.setdefault(path, leaf)
        return replace(made, form=replace(made.form, leaves=leaves))

    return _put((batches.BatchFormat, "to_batch", frozen))


def _optional_stays_none() -> AbstractContextManager[None]:
    """A field without a value in the first batch stays None."""
    to_batch = batches.BatchFormat.to_batch

    def none(self: Any, batch: Any, first_id: int, reads: Any) -> Any:
        made = to_batch(self, batch, first_id, reads)
        kept = vars(self).setdefault("nones", {path for path, leaf in made.form.leaves.items() if leaf is None})
        leaves = {path: None if path in kept else leaf for path, leaf in made.form.leaves.items()}
        return replace(made, form=replace(made.form, leaves=leaves))

    return _put((batches.BatchFormat, "to_batch", none))


def _eval_trains() -> AbstractContextManager[None]:
    return _put((pipeline.NestPipeline, "_require_ready", lambda self, batches: None))


def _checked_in_eval_mode() -> AbstractContextManager[None]:
    """The separability check looks at the model in eval mode."""
    undisturbed = adopted.undisturbed

    @contextlib.contextmanager
    def in_eval(model: Any) -> Iterator[Any]:
        with undisturbed(model) as found:
            model.eval()
            try:
                yield found
            finally:
                model.train()

    return _put((adopted, "undisturbed", in_eval))


def _nan_passes() -> AbstractContextManager[None]:
    """A comparison with NaN finds nothing."""
    require = separable.require_equal_sums

    def lenient(whole: Any, parts: Any, reduction: str) -> None:
        if all(torch.isfinite(n).all() for sums in (whole, *parts) for n in sums.numbers):
            require(whole, parts, reduction)

    return _put((separable, "require_equal_sums", lenient), (separable, "_require_finite", lambda *values: None))


def _sum_divided_by_samples() -> AbstractContextManager[None]:
    return _put((Losses, "divide_by", lambda self, summed: "count" if summed else "samples"))


def _frozen_tables_trained() -> AbstractContextManager[None]:
    configs = collections.table_configs
    thawed = lambda found: tuple(replace(table, frozen=False) for table in configs(found))  # noqa: E731
    return _put((pipeline, "table_configs", thawed))


class _ViewsForEver(Gradients):
    """Gradients are views of one vector from the start, and the vector is what is summed."""

    def begin(self) -> None:
        pass

    def reduce(self, exchange: Any) -> tuple[float, float]:
        if self._trained is None:
            return super().reduce(exchange)
        totals = torch.tensor([self._loss, self._count], dtype=torch.float64)
        exchange.all_reduce_each([*self._flat.values(), totals])
        loss, count = totals.tolist()
        return loss, count

    def end(self) -> None:
        self._loss = self._count = 0.0
        for flat in self._flat.values():
            flat.zero_()


def _zero_grad_breaks_views() -> AbstractContextManager[None]:
    def step(self: Any, factor: float = 1.0) -> None:
        self._gradients.finish(factor)
        unused = [p for p in self._gradients._weights if p.grad is not None and not p.grad.any()]
        for parameter in unused:  # their decay is another fault
            parameter.grad = None
        if self._optimizer is not None:
            self._optimizer.step()
        for parameter in unused:
            parameter.grad = self._gradients._views[id(parameter)]
        self._gradients.end()

    return _put((dense_part, "Gradients", _ViewsForEver), (dense_part.DensePart, "step", step))


def _jagged_weights_dropped() -> AbstractContextManager[None]:
    from torchrec.sparse.jagged_tensor import JaggedTensor

    return _put((JaggedTensor, "weights_or_none", _only_of_keyed(JaggedTensor.weights_or_none)))


def _only_of_keyed(weights: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import inspect

    def none(self: Any) -> Any:
        caller = inspect.stack()[1]
        return None if caller.filename.endswith("batches.py") or "keyed.py" in caller.filename else weights(self)

    return none


def _state_is_not_seen() -> AbstractContextManager[None]:
    """Buffers and counters that change in the forward pass are accepted in a frozen window."""
    return _put(
        (separable, "require_same_buffers", lambda changed: None),
        (separable, "require_stateless", lambda first, again: None),
        (separable, "require_equal_sums", lambda whole, parts, reduction: None),
    )


def _clustered_outputs() -> AbstractContextManager[None]:
    def unordered(pieces: Any, numbers: Any) -> Any:
        return outputs.merged(pieces, [torch.arange(len(n)) + 10_000 * k for k, n in enumerate(numbers)])

    return _put((pipeline, "merged", unordered))


def _new_iterator_is_the_end() -> AbstractContextManager[None]:
    """The end of one iterator is answered by the first call with the next."""
    return _put((source.Source, "is_newest", lambda self, number: True))


def _only_the_first_batch_is_looked_at() -> AbstractContextManager[None]:
    return _put((separable.Looks, "is_due", lambda self, part: False))


def _one_sample_is_enough() -> AbstractContextManager[None]:
    """A first batch of one sample passes the check, and no later one is looked at."""
    peek = Stream.peek
    return _put((Stream, "peek", lambda self, samples: peek(self, 0)), (separable.Looks, "is_due", lambda *_: False))


def _unused_weights_decay() -> AbstractContextManager[None]:
    """A weight that no sample uses gets a gradient of zeros."""
    reduce = Gradients.reduce

    def zeros(self: Any, exchange: Any) -> Any:
        found = reduce(self, exchange)
        for parameter in self._weights:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    return _put((gradients.Gradients, "reduce", zeros))


def _shared_collection_adopted_once() -> AbstractContextManager[None]:
    """A collection under a second path keeps a whole table of its own."""
    adopt = lookups.adopt

    def once(found: Mapping[str, Any], lookups_of: Any) -> None:
        adopt(found, lookups_of)

    def of_model(model: Any, lookups_of: Any) -> None:
        if hasattr(model, "alias"):
            import copy

            model.alias["same"] = copy.deepcopy(model.alias["same"])
        once(collections.find_collections(model) if not hasattr(model, "alias") else _without_alias(model), lookups_of)

    return _put((pipeline, "adopt_collections", of_model))


def _without_alias(model: Any) -> Mapping[str, Any]:
    return {path: c for path, c in collections.find_collections(model).items() if not path.startswith("alias")}


FAULTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "only lengths of ids are compared": _lengths_only,
    "the last field with a key wins": _last_field_wins,
    "dense weights differ by rank": _no_broadcast,
    "constants are the first batch's": _constants_of_the_first_batch,
    "an optional field stays None": _optional_stays_none,
    "eval mode trains": _eval_trains,
    "the check is made in eval mode": _checked_in_eval_mode,
    "NaN passes the check": _nan_passes,
    "a sum is divided by samples": _sum_divided_by_samples,
    "frozen tables are trained": _frozen_tables_trained,
    "zero_grad breaks the reduction": _zero_grad_breaks_views,
    "weights of JaggedTensors are dropped": _jagged_weights_dropped,
    "state between passes is not seen": _state_is_not_seen,
    "outputs are in clustered order": _clustered_outputs,
    "a new iterator is taken for the end": _new_iterator_is_the_end,
    "only the first batch is looked at": _only_the_first_batch_is_looked_at,
    "a first batch of one sample is enough": _one_sample_is_enough,
    "weights that nothing uses decay": _unused_weights_decay,
    "a second path keeps its own table": _shared_collection_adopted_once,
}
