"""Numbers of the paper that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from results.artefacts import Mismatch


def paper_inconsistencies(published: pd.DataFrame, batch: int = 512) -> list[Mismatch]:
    """Published numbers that contradict each other: printed latency against QPS, the scaling column against the QPS.

    ``batch``: samples per worker. A difference counts beyond what two decimals allow.
    """
    printed = published[(published["mark"] == "T") & (published["cluster"] == "NPU")]
    value = printed.set_index(["where", "workers", "paper_method", "metric"])["value"].to_dict()
    found = []
    for (where, workers, method, metric), latency in sorted(value.items()):
        qps = value.get(("III", workers, method, "qps"))
        if where != "II" or metric != "step_latency" or qps is None:
            continue
        implied = workers * batch / latency * 1e3 / 1e5
        if abs(implied - qps) > 0.005:
            text = (
                f"{method}, {workers:,} workers: Table II's {latency} ms is {implied:.3f}e5 samples/s, "
                f"Table III prints {qps:.2f}"
            )
            found.append(Mismatch("The paper, Tables II and III", text, "No single latency fits both printed numbers."))
    for (where, workers, method, metric), scaling in sorted(value.items()):
        if where != "III" or metric != "scaling":
            continue
        many, few = value["III", workers, method, "qps"], value["III", 128, method, "qps"]
        low = (many - 0.005) / (few + 0.005) * 128 / workers * 100
        high = (many + 0.005) / (few - 0.005) * 128 / workers * 100
        if not low <= scaling <= high:
            text = (
                f"{method}, {workers:,} workers: scaling printed {scaling} %, "
                f"the printed QPS allow {low:.2f} to {high:.2f} %"
            )
            found.append(
                Mismatch("The paper, Table III", text, "The column was computed from other numbers than those printed.")
            )
    found += _orthogonality(value)
    return found


def _orthogonality(value: Mapping[tuple[str, int, str, str], float]) -> list[Mismatch]:
    """Table IV: what the exposed communication saved by adding 2D-SP should do to NestPipe's QPS."""
    try:
        qps, alone = (value["IV", 1536, "NestPipe", metric] for metric in ("qps", "exposed_comm"))
        printed, both = (value["IV", 1536, "NestPipe+2D-SP", metric] for metric in ("qps", "exposed_comm"))
        latency = value["II", 1536, "NestPipe", "step_latency"]
    except KeyError:
        return []
    saved = alone - both
    expected = qps * latency / (latency - saved)
    if abs(expected - printed) <= 0.01:
        return []
    text = (
        f"NestPipe+2D-SP: {saved:.1f} ms less exposed communication than NestPipe should give {expected:.2f}e5 "
        f"samples/s, printed {printed:.2f}"
    )
    return [
        Mismatch("The paper, Table IV", text, "Something else grew by the difference; the paper does not say what.")
    ]
