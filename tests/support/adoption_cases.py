"""A user's model and batches, and what must come of them: the same training as in a plain loop, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nestpipe.adoption.losses import Summed
from nestpipe.adoption.pipeline import NestPipeline
from nestpipe.trainer import SparseOptimizer

DIM, ROWS = 4, 40
RULE = SparseOptimizer("sgd", lr=0.5)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


# ---- a model and its batches ----


@dataclass
class Clicks:
    sparse: KeyedJaggedTensor
    dense: Tensor
    label: Tensor
    extra: Any = None


def bags(names: Iterable[str] = "ab", prefix: str = "t_", weighted: bool = False, **options) -> EmbeddingBagCollection:
    """One table for each key."""
    tables = [
        EmbeddingBagConfig(
            **{"num_embeddings": ROWS, "embedding_dim": DIM, "name": prefix + n, "feature_names": [n], **options}
        )
        for n in names
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def sequences(names: Iterable[str] = "ab", need_indices: bool = False) -> EmbeddingCollection:
    tables = [EmbeddingConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"s_{n}", feature_names=[n]) for n in names]
    return EmbeddingCollection(tables=tables, need_indices=need_indices)


def keyed(
    samples: int,
    generator: torch.Generator,
    names: Iterable[str] = "ab",
    rows: int = ROWS,
    least: int = 0,
    most: int = 4,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    names = list(names)
    lengths = torch.randint(least, most + 1, (len(names) * samples,), generator=generator, dtype=torch.int32)
    total = int(lengths.sum())
    values = torch.randint(0, rows, (total,), generator=generator).to(dtype)
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=names, values=values, lengths=lengths, weights=weights)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def clicks(
    extra: Callable[[int, int, torch.Generator], Any] | None = None,
    samples: int | list[int] = 9,
    steps: int = 3,
    change: Callable[[int, Clicks], Any] | None = None,
    **options,
) -> Callable[[], Iterator[Any]]:
    """A function that gives this rank's batches. ``samples``: of each batch in turn, or of all.

    ``extra(step, samples, generator)``: the field of that name. ``change(step, batch)``: the batch instead.
    """

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(50 + rank())
        for step in range(steps):
            n = samples if isinstance(samples, int) else samples[(step + rank()) % len(samples)]
            sparse = keyed(n, generator, **options)
            dense, label = torch.randn(n, 3, generator=generator), torch.rand(n, generator=generator).round()
            batch = Clicks(sparse, dense, label, extra(step, n, generator) if extra else None)
            yield change(step, batch) if change else batch

    return batches


class Scores(nn.Module):
    """Pooled embeddings and dense features, a small network, binary cross-entropy; returns (loss, scores)."""

    def __init__(self, collection: nn.Module | None = None, width: int = 2 * DIM, middle: nn.Module | None = None):
        super().__init__()
        self.ebc = bags() if collection is None else collection
        self.net = nn.Sequential(nn.Linear(width + 3, 8), middle or nn.Tanh(), nn.Linear(8, 1))

    def pooled(self, batch: Any) -> Tensor:
        return self.ebc(batch.sparse).values()

    def score(self, batch: Any) -> Tensor:
        return self.net(torch.cat([self.pooled(batch), batch.dense], 1)).squeeze(1)

    def loss(self, score: Tensor, batch: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(score, batch.label)

    def forward(self, batch: Any) -> Any:
        score = self.score(batch)
        return self.loss(score, batch), score


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """``refused``: a pattern of the message that is expected; empty if the model must train as in a plain loop.

    ``later``: it is refused in a later step than the first, so the model is not given back as it was. ``options``: for
    NestPipeline. ``dense``: the factory of the dense optimizer. ``prepare``: what the plain loop does with a batch
    before its model, for cases with preprocess=. ``size``: the samples of a batch. ``each(step, model, optimizer)``:
    called after each step.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], Iterable[Any]]
    refused: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    dense: Callable[[list[nn.Parameter]], Any] = sgd
    prepare: Callable[[Any], Any] | None = None
    size: Callable[[Any], int] = lambda batch: len(batch.label)
    each: Callable[[int, nn.Module, Any], None] | None = None
    later: bool = False
    tolerance: float = 1e-4


def verdict(case: Case) -> str:
    """``equal``, ``refused: <message>``, ``differs: <how>``, or ``crash: <error>`` for an error of another kind."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.enable_grad():
        model, plain = (_seeded(case.model) for _ in range(2))
        before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
        options = {"micro_batches": 3, **case.options}
        try:
            ours = train_nest(model, case, options)
        except (ValueError, RuntimeError) as error:
            lines = str(error).splitlines()
            kind = type(error).__name__
            if len(lines) != 1:
                return f"crash: {kind} in {len(lines)} lines: {lines[:1]}"
            if case.refused and not case.later and not _given_back(model, before):
                return f"refused, and the model was changed: {lines[0]}"
            return f"refused: {kind}: {lines[0]}"
        except Exception as error:
            return f"crash: {type(error).__name__}: {error}"
        if case.refused:
            return "trained"
        return _compared(train_plain(plain, case, options), ours, case.tolerance)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def as_expected(case: Case, said: str) -> bool:
    return bool(re.search(case.refused, said)) and said.startswith("refused: ") if case.refused else said == "equal"


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor], float]


def train_nest(model: nn.Module, case: Case, options: Mapping[str, Any]) -> Result:
    pipeline = NestPipeline(model, case.dense, RULE, **options)
    start = table_weights(pipeline, model)
    losses = []
    try:
        batches = iter(case.batches())
        while True:
            try:
                result = pipeline.progress(batches)
            except StopIteration:
                break
            losses.append(result.global_loss)
            if case.each is not None:
                case.each(len(losses) - 1, model, pipeline.optimizer)
        tables = {name: pipeline.trainer.table(name).clone() for name in start}
        moved = max((float((tables[name] - value).abs().max()) for name, value in start.items()), default=0.0)
        dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        pipeline.close()
    return losses, tables, dense, moved


def table_weights(pipeline: NestPipeline, model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in _tables(model).items()}


def train_plain(model: nn.Module, case: Case, options: Mapping[str, Any]) -> Result:
    """Every rank holds the whole model. Gradients of the global batch's loss are summed over ranks."""
    if dist.is_initialized():
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
    tables = _tables(model)
    ids = {id(weight) for weight in tables.values()}
    dense = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [case.dense(dense)] if dense else []
    if any(weight.requires_grad for weight in tables.values()):
        optimizers.append(torch.optim.SGD([w for w in tables.values() if w.requires_grad], lr=RULE.lr))
    losses = []
    for step, raw in enumerate(case.batches()):
        batch = case.prepare(raw) if case.prepare else raw
        loss = _share(model, batch, case.size(batch), options)
        if loss.requires_grad:
            loss.backward()
        for p in model.parameters():
            _sum_gradients(p)
        for optimizer in optimizers:
            optimizer.step()
        for p in model.parameters():
            p.grad = None
        losses.append(float(_summed(loss.detach())))
        if case.each is not None:
            case.each(step, model, optimizers[0])
    found = {name: weight.detach().clone() for name, weight in tables.items()}
    return losses, found, {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in ids}, 0.0


def _share(model: nn.Module, batch: Any, samples: int, options: Mapping[str, Any]) -> Tensor:
    """This rank's share of the loss of the global batch."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    output = model(batch) if samples else torch.zeros(())
    loss = output[0] if isinstance(output, tuple | list) else output
    everywhere = float(_summed(torch.tensor(float(samples))))
    if any(_gathered(isinstance(loss, Summed))):
        total, count = (loss.total, loss.count) if isinstance(loss, Summed) else (loss, 0.0)
        divisor = float(_summed(torch.as_tensor(count).detach().double().reshape(())))
        return total.reshape(()) / divisor if divisor else total.reshape(()) * 0
    if options.get("reduction") == "sum":
        return loss.reshape(()) / world
    if options.get("average") == "ranks":
        return loss.mean() / world
    return loss.mean() * samples / everywhere if samples else loss


def _gathered(value: bool) -> list[bool]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _summed(value: Tensor) -> Tensor:
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value


def _sum_gradients(p: nn.Parameter) -> None:
    """DDP with find_unused_parameters: a weight that no rank used has no gradient."""
    if not any(_gathered(p.grad is not None)):
        return
    gradient = torch.zeros_like(p) if p.grad is None else p.grad
    p.grad = _summed(gradient.to_dense() if gradient.is_sparse else gradient)


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {}
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            held = module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings
            found |= {name: table.weight for name, table in held.items()}
    return found


def _given_back(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() >= before.keys() and all(torch.equal(after[name], value) for name, value in before.items())


def _compared(plain: Result, ours: Result, tolerance: float) -> str:
    losses = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(plain[0], ours[0], strict=False)]
    if len(plain[0]) != len(ours[0]):
        return f"differs: {len(ours[0])} steps instead of {len(plain[0])}"
    moved = max(ours[3], 1e-3)
    gaps = {name: float((value - ours[1][name]).abs().max()) / moved for name, value in plain[1].items()}
    for name, value in plain[2].items():
        gaps[name] = float((value.float() - ours[2][name].float()).abs().max())
    worst = max(gaps, key=lambda name: gaps[name]) if gaps else ""
    if max(losses, default=0.0) > tolerance or (gaps and gaps[worst] > 10 * tolerance):
        return f"differs: losses {ours[0]} instead of {plain[0]}, '{worst}' by {gaps.get(worst, 0.0):.2g}"
    return "equal"
