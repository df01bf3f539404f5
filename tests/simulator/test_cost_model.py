"""The cost model: what must hold for any numbers, and the messages for bad input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.methods import Method, UnknownMethod, find_method
from nestpipe.simulator.cost import Cluster, ClusterError, cluster_of, stage_seconds
from nestpipe.simulator.hardware import Hardware, ProfileError, hardware_from_table, hardware_to_toml
from nestpipe.simulator.profile import known_profiles, load_profile, resized
from nestpipe.simulator.reference import Reference, reference_hardware
from nestpipe.simulator.scenario import ALL, priced_methods
from nestpipe.simulator.step_times import seconds_per_op, steady_account, steady_plan, steady_step_ms
from nestpipe.simulator.workload import KeyStatistics, Workload, WorkloadError

H100 = load_profile("h100-ib")
NPU = load_profile("npu-1536-industrial")
METHOD = st.sampled_from(sorted(ALL))
RATES = [name for name in Hardware.__dataclass_fields__ if name.endswith("_per_s")]


def step_ms(name: str, hardware: Hardware, workload: Workload, workers: int, micro_batches: int = 8) -> float:
    method = find_method(name)
    n = method.micro_batches_of(micro_batches)
    cluster = cluster_of(method, hardware, workers, 2 if workers % 2 == 0 else 1)
    return step_of(method, n, stage_seconds(cluster, workload, n))


def step_of(method: Method, n: int, seconds: Mapping[str, float]) -> float:
    plan = steady_plan(method, n)
    return float(steady_step_ms(plan, seconds_per_op(plan, [seconds]))[0])


@settings(max_examples=40, deadline=None)
@given(METHOD, st.sampled_from(RATES), st.floats(1.0, 20.0), st.sampled_from([2, 16, 128, 1536]))
def test_a_higher_rate_never_slows_a_step(name, rate, factor, workers):
    faster = replace(H100.hardware, **{rate: getattr(H100.hardware, rate) * factor})
    before = step_ms(name, H100.hardware, H100.workload, workers)
    assert step_ms(name, faster, H100.workload, workers) <= before * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(METHOD, st.integers(1, 16))
def test_one_worker_communicates_nothing(name, micro_batches):
    method = find_method(name)
    n = method.micro_batches_of(micro_batches)
    seconds = stage_seconds(Cluster(H100.hardware, 1), H100.workload, n)
    assert seconds["E"] == seconds["G"] == seconds["A"] == seconds["D"] == 0.0
    times = steady_account(method, n, [seconds])
    assert times["communication"][0] == times["exposed_communication"][0] == 0.0


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["fwp-only", "nestpipe", "dbp-only", "serial"]), st.integers(1, 16))
def test_nothing_but_dense_takes_the_dense_time(name, micro_batches):
    method = find_method(name)
    n = method.micro_batches_of(micro_batches)
    cost = stage_seconds(Cluster(NPU.hardware, 512), NPU.workload, n)
    dense_only = {stage: value if stage in "FB" else 0.0 for stage, value in cost.items()}
    assert step_of(method, n, dense_only) == pytest.approx((cost["F"] + cost["B"]) * n * 1e3)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 8, 128, 1536]), st.sampled_from(["h100-ib", "npu-1536-industrial"]))
def test_serial_is_the_sum_of_its_parts(workers, profile):
    chosen = load_profile(profile)
    seconds = stage_seconds(Cluster(chosen.hardware, workers), chosen.workload, 1)
    used = {stage: value for stage, value in seconds.items() if stage not in "SD"}
    assert step_ms("serial", chosen.hardware, chosen.workload, workers) == pytest.approx(sum(used.values()) * 1e3)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 16),
    st.floats(0.05, 0.9),
    st.sampled_from([128, 512, 1536]),
)
def test_nestpipe_exposes_one_nth_while_compute_covers_the_rest(micro_batches, part, workers):
    """The closed form T = F + r + C / N of design note cost_model.md, if C < F and host stages fit."""
    reference = Reference(1000.0, 10.0, 100.0, 0.0, 100.0, 0.0, 0.0, 1.0, 0.0, micro_batch_ms=0.0)
    reference = replace(reference, exchange_ms=1000.0 * part)
    workload = NPU.workload
    hardware = reference_hardware("x", reference, workload)
    c = 1000.0 * part * (workers - 1) / workers
    expected = 1000.0 + 10.0 + c / micro_batches
    assert step_ms("nestpipe", hardware, workload, workers, micro_batches) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ratio", [1.3, 3.0])
def test_nestpipe_when_communication_exceeds_compute(ratio):
    reference = Reference(800.0, 0.0, 800.0 * ratio, 0.0, 1e-6, 0.0, 0.0, 1.0, 0.0, micro_batch_ms=0.0)
    hardware = reference_hardware("x", reference, NPU.workload)
    c = 800.0 * ratio * 1535 / 1536
    step = step_ms("nestpipe", hardware, NPU.workload, 1536, 8)
    # The lane of the All2Alls never idles: E runs three micro-batches ahead, which a simple closed form ignores.
    assert step == pytest.approx(c)


def test_published_profile_gives_its_reference_times():
    reference, n = NPU.reference, 1536
    seconds = stage_seconds(Cluster(NPU.hardware, n), NPU.workload, 1)
    c = (reference.exchange_ms + reference.exchange_per_worker_ms * n) * (n - 1) / n
    lookup = reference.lookup_ms + reference.lookup_per_worker_ms * n + reference.lookup_jump_ms
    assert (seconds["E"] + seconds["G"]) * 1e3 == pytest.approx(c, rel=1e-6)
    # Keys travel too: a two-hundredth of the rows' bytes.
    assert (seconds["K"] + seconds["R"]) * 1e3 == pytest.approx(lookup, rel=2e-3)
    assert (seconds["F"] + seconds["B"]) * 1e3 == pytest.approx(reference.dense_ms + reference.micro_batch_ms)


def test_no_time_depends_on_the_assumed_reference_dimensions():
    other = Workload(KeyStatistics(100.0), embedding_dim=64, dense_layers=2, width=64, sequence_length=32)
    for workload in (NPU.workload, other):
        hardware = reference_hardware("x", NPU.reference, workload)
        seconds = stage_seconds(Cluster(hardware, 1536), workload, 8)
        assert seconds["F"] * 8e3 == pytest.approx((NPU.reference.dense_ms + 8 * 0.9) / 3)
        assert seconds["E"] == pytest.approx(stage_seconds(Cluster(NPU.hardware, 1536), NPU.workload, 8)["E"])


def test_gpu_profile_gives_its_published_row():
    gpu = load_profile("gpu-128-kuairand")
    times = steady_account(find_method("serial"), 1, [stage_seconds(Cluster(gpu.hardware, 128), gpu.workload, 1)])
    assert times["step"][0] == pytest.approx(4207.94, rel=1e-3)
    assert times["exposed_lookup"][0] == pytest.approx(856.63, rel=2e-3)
    assert times["exposed_communication"][0] == pytest.approx(312.19, rel=1e-3)


def test_larger_models_cost_more():
    base = NPU.workload
    deeper, wider, longer = (
        resized(base, dense_layers=8),
        resized(base, embedding_dim=1536),
        resized(base, sequence_length=2048),
    )
    cluster = Cluster(NPU.hardware, 1536)
    cost = {name: stage_seconds(cluster, w, 8) for name, w in zip("bdwl", (base, deeper, wider, longer), strict=True)}
    assert cost["d"]["F"] > 1.5 * cost["b"]["F"] and cost["d"]["E"] == cost["b"]["E"]
    assert cost["w"]["E"] == pytest.approx(2 * cost["b"]["E"])
    assert cost["l"]["F"] > 2 * cost["b"]["F"] and cost["l"]["E"] > 1.8 * cost["b"]["E"]


def test_duplication_is_interpolated_and_flat_beyond():
    keys = KeyStatistics(10.0, duplication={4: 1.2, 16: 1.4})
    assert keys.duplication_at(1) == 1.0
    assert keys.duplication_at(8) == pytest.approx(1.3)
    assert keys.duplication_at(64) == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"origin": "measured", "flops_per_s": 0.0}, "flops_per_s is 0.0; it must be above 0"),
        ({"origin": "measured", "flops_per_s": 1e9, "network_bytes_per_s": 0}, "network_bytes_per_s is 0"),
        ({"origin": "measured", "flops_per_s": 1e9, "host_row_s": -1.0}, "host_row_s is -1.0"),
        ({"origin": "measured", "flops_per_s": 1e9, "speed": 1}, "unknown key 'speed'"),
        ({"origin": "measured", "flops_per_s": "fast"}, "flops_per_s must be a number, not 'fast'"),
        ({"origin": "measured"}, "lacks flops_per_s"),
        ({}, "lacks origin and flops_per_s"),
        ({"origin": "measured", "flops_per_s": math.nan}, "flops_per_s is nan"),
    ],
)
def test_bad_hardware_says_what_in_one_line(table, message):
    with pytest.raises(ProfileError, match="hardware 'mine'") as error:
        hardware_from_table("mine", table)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_bad_names_list_the_known_ones():
    with pytest.raises(ProfileError, match="gpu-128-kuairand, h100-ib, npu-1536-industrial"):
        load_profile("tpu")
    with pytest.raises(UnknownMethod, match=r"unknown method 'magic'; choose one of .*nestpipe, .*serial, torchrec"):
        priced_methods("serial,magic")
    assert {"gpu-128-kuairand", "h100-ib", "npu-1536-industrial"} <= set(known_profiles())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cluster(H100.hardware, 10, 4), "10 workers cannot be split into 4 groups"),
        (lambda: Cluster(H100.hardware, 0), "must be at least 1"),
        (lambda: stage_seconds(Cluster(H100.hardware, 2), H100.workload, 0), "0 micro-batches of 512 samples"),
        (lambda: resized(H100.workload, embedding_dim=-4), "embedding dim is -4"),
        (lambda: resized(H100.workload, sequence_length=-1), "sequence length is -1"),
        (lambda: resized(H100.workload, batch_size=-1), "batch size is -1"),
    ],
)
def test_bad_sizes_say_what_in_one_line(call, message):
    with pytest.raises((ClusterError, WorkloadError), match=message):
        call()


def test_a_profile_written_is_a_profile_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(hardware_to_toml(H100.hardware, {"embedding_dim": 32, "keys_per_sample": 10}))
    read = load_profile(str(path))
    assert replace(read.hardware, name="h100-ib") == H100.hardware
    assert read.workload.embedding_dim == 32
    path.write_text("[hardware\n")
    with pytest.raises(ProfileError, match="cannot be read as TOML"):
        load_profile(str(path))
