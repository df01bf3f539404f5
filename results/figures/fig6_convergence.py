"""Figure 6: loss and accuracy of the methods over the same data and seeds, and their final gaps to TorchRec (RQ2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from nestpipe.methods import SERIAL
from nestpipe.training.convergence import ULP, Curve
from results.artefacts import Artefact, Table
from results.figures.style import COLOURS, figure, marker, picture
from results.frames.labels import Variant, label_of
from results.sources import Sources

REFERENCE = "torchrec"
QUALITY = ("HR@10", "HR@50", "NDCG@10", "NDCG@50")
#: Mean absolute difference of a step's loss over the last quarter of the steps. It has the same size for every
#: method that differs by rounding, and is far less noisy than the accuracy over a few thousand users.
DRIFT = "drift of the loss"
_PUBLISHED = {  # [N], KuaiRand-27K with FuXi, 1e-3
    "nestpipe": "within 0.3",
    "uniemb": "HR@10 -2.1, HR@50 -2.7",
    "2d-sp": "about -0.7 to -1.0",
}


@dataclass(frozen=True)
class Gap:
    """Paired over seeds: mean of (method - other), and its 95 % interval by Student's t (NaN for one seed)."""

    mean: float
    low: float
    high: float
    each: tuple[float, ...]


def paired_gap(values: Sequence[float], reference: Sequence[float]) -> Gap:
    """``values`` minus ``reference``, both by seed in the same order."""
    difference = np.subtract(values, reference)
    mean, n = float(difference.mean()), len(difference)
    half = float(stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    return Gap(mean, mean - half, mean + half, tuple(map(float, difference)))


def drift(curve: Curve, other: Curve) -> float:
    """Mean absolute difference of the two runs' losses over the last quarter of the steps."""
    apart = np.abs(np.subtract(curve.losses, other.losses))
    return float(apart[len(apart) * 3 // 4 :].mean())


def drift_ratio(method: str, curves: Iterable[Curve], reference: str = REFERENCE) -> Gap:
    """Drift of ``method`` from ``reference`` over that of ``reference`` with one weight moved by one ulp.

    Geometric mean over seeds and its paired 95 % interval. Rounding errors grow chaotically, so only a ratio can be
    compared. It is 0 for a method without any drift. Raises KeyError if a run is missing.
    """
    by = _by_method(curves)
    seeds = sorted(by[reference].keys() & by[reference + ULP].keys() & by[method].keys())
    ours = np.array([drift(by[method][s], by[reference][s]) for s in seeds])
    twin = np.array([drift(by[reference + ULP][s], by[reference][s]) for s in seeds])
    if not ours.any():
        return Gap(0.0, 0.0, 0.0, (0.0,) * len(seeds))
    logs = paired_gap(np.log(np.maximum(ours, 1e-30)), np.log(np.maximum(twin, 1e-30)))
    mean, low, high, *each = np.exp([logs.mean, logs.low, logs.high, *logs.each]).tolist()
    return Gap(mean, low, high, tuple(each))


def within_rounding(method: str, curves: Iterable[Curve], reference: str = REFERENCE) -> bool:
    """Whether ``method`` stays as near to ``reference`` as ``reference`` with one weight moved by one ulp does.

    It does if its ``drift_ratio`` is at most 1 or the interval reaches down to 1. Raises KeyError if a run is missing.
    """
    ratio = drift_ratio(method, curves, reference)
    return ratio.mean <= 1 or bool(ratio.low <= 1)


def fig6(sources: Sources) -> Artefact:
    """The curves of the setting that has the most. The others stay in their folder."""
    title = "Figure 6: loss and accuracy (RQ2)"
    curves = sources.curves()
    if not curves:
        return Artefact("fig6", title, text=("There are no curves yet; nestpipe converge makes them.",))
    by = _by_method(curves)
    shown = [name for name in by if not name.endswith(ULP)]
    made, axes = figure(3, width=3.6)
    _loss_panel(axes[0], by, shown)
    for panel, metric in zip(axes[1:], ("HR@10", "NDCG@10"), strict=True):
        _quality_panel(panel, by, shown, metric)
    axes[0].legend(fontsize=6)
    users = int(curves[0].quality["users"][-1])
    seeds = max(len(runs) for runs in by.values())
    config = curves[0].config
    what = f"{config['data']['dataset']}, {users:,} evaluation users, {seeds} seeds, {config['model']['backbone']}"
    caption = f"Measured on this machine ({what}, {config['steps']} steps of {config['workers']} ranks). Lines: means "
    caption += "over seeds; bands: the range. HR and NDCG are for the last item of each user, which is left out."
    return Artefact(
        "fig6",
        title,
        (_gap_table(by, what),),
        (
            picture(
                "fig6",
                caption,
                "Three panels, loss by step and HR@10 and NDCG@10 by step: the curves of TorchRec and NestPipe "
                "coincide.",
                made,
            ),
        ),
    )


def _by_method(curves: Iterable[Curve]) -> dict[str, dict[int, Curve]]:
    by: dict[str, dict[int, Curve]] = {}
    for curve in curves:
        by.setdefault(curve.method, {})[curve.seed] = curve
    order = [name for name in (REFERENCE, REFERENCE + ULP) if name in by]
    return {name: by[name] for name in [*order, *(n for n in by if n not in order)]}


def _label(method: str) -> str:
    plain = method.removesuffix(ULP)
    return label_of(Variant(plain)) + (", one weight + 1 ulp" if plain != method else "")


def _loss_panel(panel: Axes, by: Mapping[str, Mapping[int, Curve]], shown: Sequence[str]) -> None:
    for i, name in enumerate(shown):
        losses = np.array([curve.losses for curve in by[name].values()])
        window = max(1, losses.shape[1] // 50)
        smooth = np.array([np.convolve(row, np.ones(window) / window, mode="valid") for row in losses])
        steps = np.arange(window, losses.shape[1] + 1)
        panel.plot(steps, smooth.mean(0), color=COLOURS[i], label=_label(name), lw=1, ls=("-", "--", ":", "-.")[i % 4])
        panel.fill_between(steps, smooth.min(0), smooth.max(0), color=COLOURS[i], alpha=0.15, lw=0)
    panel.set(title="training loss", xlabel="step", ylabel=f"loss, mean of {window} steps")


def _quality_panel(panel: Axes, by: Mapping[str, Mapping[int, Curve]], shown: Sequence[str], metric: str) -> None:
    for i, name in enumerate(shown):
        runs = list(by[name].values())
        values, steps = np.array([run.quality[metric] for run in runs]), runs[0].evaluated
        style = ("-", "--", ":", "-.")[i % 4]
        panel.plot(steps, values.mean(0), style, color=COLOURS[i], marker=marker(i), ms=3, lw=1, label=_label(name))
        panel.fill_between(steps, values.min(0), values.max(0), color=COLOURS[i], alpha=0.15, lw=0)
    panel.set(title=metric, xlabel="step")


def _gap_table(by: Mapping[str, Mapping[int, Curve]], what: str) -> Table:
    reference = by.get(REFERENCE, {})
    rows, cells = [], []
    for name, runs in by.items():
        seeds = sorted(runs.keys() & reference.keys())
        final = {metric: [runs[s].quality[metric][-1] for s in sorted(runs)] for metric in QUALITY}
        gone = sum(bool(run.diverged) for run in runs.values())
        row = {"method": _label(name) + (f" (DIVERGED with {gone} of {len(runs)} seeds)" if gone else "")}
        for metric in QUALITY:
            spread = f" ± {np.std(final[metric], ddof=1) * 1e3:.1f}" if len(runs) > 1 else ""
            row[f"{metric}, 1e-3"] = f"{np.mean(final[metric]) * 1e3:.1f}{spread}"
            mean = sum(final[metric]) / len(runs)
            cells.append(_cell(name, metric, mean, min(final[metric]), max(final[metric]), len(runs)))
        for metric in QUALITY:
            if name == REFERENCE or not seeds:
                row[f"gap {metric}, 1e-3"] = "-"
                continue
            theirs = [reference[s].quality[metric][-1] for s in seeds]
            gap = paired_gap([runs[s].quality[metric][-1] for s in seeds], theirs)
            interval = "" if np.isnan(gap.low) else f" [{gap.low * 1e3:+.2f}, {gap.high * 1e3:+.2f}]"
            row[f"gap {metric}, 1e-3"] = f"{gap.mean * 1e3:+.2f}{interval}"
            cells.append(_cell(name, f"gap {metric}", gap.mean, gap.low, gap.high, len(seeds)))
        drifts = [drift(runs[s], reference[s]) for s in seeds]
        row[DRIFT] = "-" if name == REFERENCE or not seeds else f"{np.mean(drifts):.2g}"
        row |= _against_twin(name, by)
        row["published gap [N], 1e-3"] = _PUBLISHED.get(name, "-")
        rows.append(row)
    caption = (
        f"Measured here: {what}. Accuracy: mean ± standard deviation over seeds after the last step. Gaps: to real "
        "TorchRec, paired by seed, with the 95 % interval of Student's t. Drift: mean absolute difference of a step's "
        "loss over the last quarter of the steps. Over the twin's: relative to the drift of TorchRec with one weight "
        "moved by one unit in the last place (geometric mean, paired 95 % interval). No more than rounding: the ratio "
        f"is at most 1, or its interval reaches 1.{_against_serial(by)} [N]: public notes on the paper, for "
        "KuaiRand-27K with FuXi. Other data give gaps of other sizes."
    )
    return Table("fig6", "Final accuracy and gaps to TorchRec", caption, pd.DataFrame(rows), pd.DataFrame(cells))


def _against_twin(name: str, by: Mapping[str, Mapping[int, Curve]]) -> dict[str, str]:
    """The drift over that of TorchRec's twin, and whether it is no more than rounding."""
    heads = ("over the twin's", "no more than rounding")
    if name in (REFERENCE, REFERENCE + ULP) or REFERENCE + ULP not in by or REFERENCE not in by:
        return dict.fromkeys(heads, "-")
    curves = [curve for runs in by.values() for curve in runs.values()]
    ratio = drift_ratio(name, curves)
    interval = "" if np.isnan(ratio.low) else f" [{ratio.low:.2g}, {ratio.high:.2g}]"
    return dict(
        zip(heads, (f"{ratio.mean:.2g}{interval}", "yes" if within_rounding(name, curves) else "no"), strict=True)
    )


def _against_serial(by: Mapping[str, Mapping[int, Curve]]) -> str:
    """How NestPipe differs from serial with the same micro-batches, if both have run."""
    for name, runs in by.items():
        seeds = sorted(runs.keys() & by.get("nestpipe", {}).keys())
        if name != SERIAL.name and name.partition("(")[0] == SERIAL.name and seeds:
            mine = [by["nestpipe"][s] for s in seeds]
            losses = max(
                float(np.abs(np.subtract(a.losses, runs[s].losses)).max()) for a, s in zip(mine, seeds, strict=True)
            )
            scores = max(
                abs(a.quality[m][-1] - runs[s].quality[m][-1])
                for a, s in zip(mine, seeds, strict=True)
                for m in QUALITY
            )
            return f" NestPipe against {name}: losses differ by at most {losses:.2g}, HR and NDCG by {scores:.2g}."
    return ""


def _cell(name: str, metric: str, value: float, low: float, high: float, seeds: int) -> dict[str, object]:
    return {
        "metric": metric,
        "label": _label(name),
        "kind": "measured",
        "value": float(value),
        "low": float(low),
        "high": float(high),
        "n": seeds,
    }
