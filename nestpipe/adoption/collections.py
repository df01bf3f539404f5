"""A model's embedding collections: which it has, whether they can be adopted, and what their tables are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.tables import TableConfig
from nestpipe.machine.versions import require_torchrec
from nestpipe.trainer import SparseOptimizer

require_torchrec()

from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

KINDS = (EmbeddingBagCollection, EmbeddingCollection)

#: Modules that own tables and cannot be adopted: a part of the class's name, and what to do.
_REFUSED = {
    "ManagedCollision": "map the ids in the data loader (or in preprocess=) and use the plain collection inside it",
    "ITEP": "use the plain collection inside it",
    "Fused": "pass the model before fuse_embedding_optimizer, and the optimizer as sparse_optimizer=",
    "Quant": "pass the model before it is quantised; quantise what export() returns",
    "Sharded": "pass the model before it is sharded",
    "DistributedModelParallel": "pass the model before it is sharded",
    "DMPCollection": "pass the model before it is sharded",
    "SplitTableBatchedEmbeddingBags": "use torchrec's EmbeddingBagCollection",
    "SSDTableBatchedEmbeddingBags": "use torchrec's EmbeddingBagCollection",
    "PECEmbedding": "use the plain collection",
}


@dataclass(frozen=True)
class Slot:
    """One output of a collection: its ``table``, the KeyedJaggedTensor's ``key``, the output's ``name``."""

    table: str
    key: str
    name: str
    pooling: str


def find_collections(model: nn.Module) -> dict[str, Any]:
    """The embedding collections of ``model``, each once, by its first path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, KINDS)}


def require_adoptable(model: nn.Module) -> None:
    """Raises ValueError, naming module and remedy, if a table would stay in the model or train otherwise than meant."""
    for path, module in model.named_modules():
        place = f"{path or 'the model'} ({type(module).__name__})"
        if hasattr(module, "adopted"):
            raise ValueError(f"{place} is trained by another NestPipeline: call its detach() first")
        if isinstance(module, KINDS):
            if type(module).forward not in (EmbeddingBagCollection.forward, EmbeddingCollection.forward):
                raise ValueError(f"{place} has a forward of its own, which NestPipe cannot replace: wrap a collection")
            continue
        for cls in type(module).__mro__:
            origin = cls.__module__.partition(".")[0]
            for part, remedy in _REFUSED.items() if origin in ("torchrec", "fbgemm_gpu") else ():
                quantised = part == "Quant" and cls.__module__.startswith("torchrec.quant.")
                if part in cls.__name__ or quantised:
                    raise ValueError(f"{place} has tables that NestPipe cannot train: {remedy}")
    collections = find_collections(model)
    if not collections:
        raise ValueError("the model holds no EmbeddingBagCollection or EmbeddingCollection")
    _require_untied(model, collections)


def _require_untied(model: nn.Module, collections: Mapping[str, Any]) -> None:
    tables = {id(table): name for c in collections.values() for name, table in tables_of(c).items()}
    homes = {id(tables_of(collection)) for collection in collections.values()}
    weights = {id(t.weight): name for c in collections.values() for name, t in tables_of(c).items()}
    stores = {
        t.weight.untyped_storage().data_ptr(): name
        for c in collections.values()
        for name, t in tables_of(c).items()
        if not t.weight.is_meta
    }
    if len(weights) < len(tables):
        raise ValueError("two tables of the model share one weight; NestPipe trains each table for itself: untie them")
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in homes or id(module) in tables:
            continue
        for name, part in module.named_children():
            if id(part) in tables:
                raise ValueError(f"{path}.{name} is table '{tables[id(part)]}' outside its collection: untie them")
        for name, parameter in module.named_parameters(recurse=False):
            tied = weights.get(id(parameter))
            if tied is None and not parameter.is_meta and parameter.numel():
                tied = stores.get(parameter.untyped_storage().data_ptr())
            if tied is not None:
                raise ValueError(
                    f"{path or 'the model'}.{name} is the weight of table '{tied}': a table that the dense part uses "
                    "as a whole (such as a tied softmax) cannot be sharded; give the dense part a weight of its own"
                )


def require_whole_gradients(model: nn.Module, micro_batches: int) -> None:
    """Raises ValueError for a weight outside the tables whose gradient is used before that of the batch is known."""
    tables = {id(t) for c in find_collections(model).values() for t in c.parameters()}
    for name, weight in model.named_parameters():
        if id(weight) in tables:
            continue
        if hasattr(weight, "_in_backward_optimizers") or weight._post_accumulate_grad_hooks:
            raise ValueError(
                f"weight '{name}' has an optimizer or a hook in its backward pass, before gradients are summed over "
                "ranks and micro-batches: state its optimizer as dense_optimizer="
            )
        if micro_batches > 1 and weight._backward_hooks:
            raise ValueError(
                f"weight '{name}' has a hook on its gradient, which would run once for each micro-batch: change "
                "gradients in the step() of dense_optimizer, or train with micro_batches=1"
            )


def table_configs(collections: Mapping[str, Any]) -> tuple[TableConfig, ...]:
    """All tables, without features, since batches name them. A table that needs no gradient is frozen.

    Raises ValueError for unequal dims, rows other than float32, equal names.
    """
    tables: list[TableConfig] = []
    for path, collection in collections.items():
        for config in configs_of(collection):
            if config.data_type.name != "FP32":
                raise ValueError(f"table '{config.name}' of {path} is {config.data_type.name}; the engine needs FP32")
            weight = tables_of(collection)[config.name].weight
            if weight.dtype != torch.float32:
                raise ValueError(f"table '{config.name}' of {path} is {weight.dtype}; the engine needs torch.float32")
            if config.name in (table.name for table in tables):
                raise ValueError(f"two collections have a table '{config.name}'; give it another name in {path}")
            scale = config.num_embeddings**-0.5  # torchrec's default range
            name, rows, dim = config.name, config.num_embeddings, config.embedding_dim
            fill = _own_start(config) if weight.is_meta else None
            tables.append(TableConfig(name, rows, dim, (), scale, not weight.requires_grad, fill))
    if len({table.dim for table in tables}) > 1:
        dims = ", ".join(f"{table.name} {table.dim}" for table in tables)
        raise ValueError(
            f"tables of unequal dims cannot share the dual buffer yet: {dims}; give all of them the largest "
            "embedding_dim, and narrow the output with a Linear if the model needs it"
        )
    return tuple(tables)


def _own_start(config: Any) -> Any:
    """The function that fills a table whose config asks for other first values than torchrec's default, else None."""
    fill = config.init_fn
    limits = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    stated = config.weight_init_min is not None or config.weight_init_max is not None
    is_range = isinstance(fill, partial) and fill.func is nn.init.uniform_ and fill.keywords == limits
    return None if is_range and not stated else fill


def whole_tables(collections: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights [rows, dim] by table, for the tables that have values (those not on the meta device)."""
    found: dict[str, Tensor] = {}
    for collection in collections.values():
        found |= {name: t.weight.detach() for name, t in tables_of(collection).items() if not t.weight.is_meta}
    return found


def tables_of(collection: Any) -> Any:
    """A ModuleDict by table; each module has a ``weight`` [rows, dim]."""
    return collection._modules[tables_name(collection)]


def tables_name(collection: Any) -> str:
    return "embedding_bags" if isinstance(collection, EmbeddingBagCollection) else "embeddings"


def configs_of(collection: Any) -> list[Any]:
    bags = isinstance(collection, EmbeddingBagCollection)
    return list(collection.embedding_bag_configs() if bags else collection.embedding_configs())


def slots_of(collection: Any) -> tuple[Slot, ...]:
    """The collection's outputs, in torchrec's order."""
    configs = configs_of(collection)
    return tuple(
        Slot(config.name, key, name, config.pooling.name.lower() if hasattr(config, "pooling") else "")
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for key, name in zip(config.feature_names, names, strict=True)
    )


def stated_optimizer(collections: Mapping[str, Any]) -> SparseOptimizer:
    """The rule that ``apply_optimizer_in_backward`` set. Raises ValueError for none, several, or an unknown one."""
    stated = set(_stated(collections))
    if len(stated) != 1 or len(next(iter(stated))[0]) != 1:
        raise ValueError(
            "pass sparse_optimizer=SparseOptimizer(...), or use one apply_optimizer_in_backward for all tables"
        )
    (name,), options = next(iter(stated))
    rules = {"SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad"}
    known = {key: value for key, value in options if key in ("lr", "eps")}
    if name not in rules or len(known) < len(options):
        raise ValueError(
            f"the tables' optimizer is {name}({dict(options)}); the engine has only {', '.join(rules)} with lr and eps"
        )
    defaults = {"SGD": {"lr": 1e-3}, "RowWiseAdagrad": {"lr": 1e-2, "eps": 1e-10}}[name]
    return SparseOptimizer(rules[name], **{**defaults, **known})


def _stated(collections: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for collection in collections.values():
        for parameter in collection.parameters():
            if not parameter.requires_grad:
                continue
            classes = getattr(parameter, "_optimizer_classes", [])
            options = getattr(parameter, "_optimizer_kwargs", [{}])
            yield (tuple(c.__name__ for c in classes), *(tuple(sorted(o.items())) for o in options))
