"""Why numbers that should agree do not: the reasons that are known, and the sentence for those that are not."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from results.artefacts import Mismatch

UNKNOWN = "Not explained by the model."

#: (metric, method) -> reason; the first that fits. "" fits all.
_REASONS = (
    (
        "exposed lookup",
        "UniEmb",
        "One hand-over time serves every pipeline in the model; the paper prints two (36.21 and 30.19 ms). What UniEmb "
        "does beyond NestPipe there is not public.",
    ),
    (
        "exposed lookup",
        "NestPipe",
        "One hand-over time serves every pipeline in the model; the paper prints two (36.21 and 30.19 ms).",
    ),
    (
        "exposed communication",
        "NestPipe",
        "The model exposes exactly 1/N of the All2All with N = 8; the paper's share is 13.0 %: first and last "
        "micro-batches may be larger, or N not quite 8.",
    ),
    (
        "exposed communication",
        "TorchRec",
        "C(n) grows linearly in the model and is fitted to all scales at once.",
    ),
    (
        "communication",
        "2D-SP",
        "Replica synchronisation is one fitted time; group count and its growth are not published.",
    ),
    (
        "QPS",
        "",
        "QPS is printed with two decimals and does not always follow from the printed latency (see the paper's own "
        "inconsistencies).",
    ),
    (
        "scaling",
        "2D-SP",
        "The model has one lookup relative to TorchRec's at every scale, and the paper's column was computed from "
        "other numbers than its printed QPS.",
    ),
    ("scaling", "", "The paper's column was computed from other numbers than its printed QPS."),
)


def why(metric: str, workers: int, label: str) -> str:
    """The reason for a simulated cell that is off, or that none is known."""
    for name, method, reason in _REASONS:
        if name in metric and method in label:
            return reason
    return UNKNOWN


def paper_inconsistencies(published: pd.DataFrame, batch: int = 512) -> list[Mismatch]:
    """Published numbers that contradict each other: printed latency against QPS, the scaling column against the QPS.

    ``batch``: samples per worker. A difference counts beyond what two decimals allow.
    """
    printed = published[(published["mark"] == "T") & (published["cluster"] == "NPU")]
    value = printed.set_index(["where", "workers", "method", "metric"])["value"].to_dict()
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
