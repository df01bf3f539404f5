"""A batch's sparse features in torchrec's form, for models and pipelines of torchrec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nestpipe.data.batch import Jagged

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def to_keyed_jagged_tensor(sparse: Mapping[str, Jagged]) -> KeyedJaggedTensor:
    """``Batch.sparse`` as one KeyedJaggedTensor, keys in the mapping's order. Raises ImportError without torchrec."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(sparse),
        values=torch.cat([feature.flat for feature in sparse.values()]),
        lengths=torch.cat([feature.counts for feature in sparse.values()]),
    )
