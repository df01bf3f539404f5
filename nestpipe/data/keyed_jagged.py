"""Sparse features in torchrec's format, for its models and pipelines. Importing this module needs torchrec."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nestpipe.data.batch import Jagged
from nestpipe.machine.versions import require_torchrec

require_torchrec()

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402


def keyed_jagged_tensor(
    features: Mapping[str, Jagged], weights: Mapping[str, Jagged] | None = None
) -> KeyedJaggedTensor:
    """``features`` (such as ``Batch.sparse``) as one KeyedJaggedTensor, keys in the mapping's order.

    ``weights``: by key, float32, one for each value of a feature; either all keys have weights or none has.
    """
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([feature.values() for feature in features.values()]),
        lengths=torch.cat([feature.lengths() for feature in features.values()]),
        weights=torch.cat([weights[key].values() for key in features]) if weights else None,
    )
