"""An exchange asks for the backend of the tensors' device, whatever the name of the whole group is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nestpipe.ranks.collectives import Exchange


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_gloo_is_found_by_device(backend: str, tmp_path) -> None:
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exchange = Exchange()
        assert exchange._gloo_on(torch.device("cpu"))
        exchange.close()
    finally:
        dist.destroy_process_group()
