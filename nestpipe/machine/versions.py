"""Checks that torch, torchrec and fbgemm fit together: when torchrec is imported, never before.

The three are built against each other: fbgemm 1.9 does not load with torch 2.13 (undefined symbol), and the CUDA
wheel of fbgemm, which torchrec asks for, breaks a CPU install (``libtorch_cuda.so``). The errors that follow name
neither the versions nor the fix; the error raised here does. The engine itself needs only torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata

#: The triple that this project is tested with; a later patch release of each is accepted too.
TESTED = {"torch": "2.13", "torchrec": "1.8", "fbgemm": "1.8"}

FIX = """\
Install the three together:
  pip install torch==2.13.0 torchrec==1.8.0 fbgemm-gpu==1.8.0                       (CUDA)
  pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 tensordict pyre-extensions iopath tqdm
  pip install --no-deps torchrec==1.8.0                                             (CPU: both lines)
On a CPU, do not install torchrec's dependency fbgemm-gpu: it is the CUDA build and overwrites the CPU build."""


def installed_versions(version: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """Version of torch, torchrec and fbgemm by name, without a build tag (``+cpu``); ``not installed`` if absent.

    The version of fbgemm is that of the CPU distribution if it is installed, else that of the CUDA one.
    """

    def first_of(*distributions: str) -> str:
        for name in distributions:
            try:
                return version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                continue
        return "not installed"

    return {
        "torch": first_of("torch"),
        "torchrec": first_of("torchrec"),
        "fbgemm": first_of("fbgemm-gpu-cpu", "fbgemm-gpu"),
    }


def mismatch(found: dict[str, str]) -> str | None:
    """What is wrong with the installed triple and how to fix it, or None if it is the tested one."""
    wrong = [n for n, want in TESTED.items() if found[n] != want and not found[n].startswith(want + ".")]
    if not wrong:
        return None
    return _explain(found, f"{' and '.join(wrong)} not as tested")


def require_torchrec() -> None:
    """Import torchrec, or raise ImportError that names the three versions and the fix."""
    found = installed_versions()
    problem = mismatch(found)
    if problem:
        raise ImportError(problem)
    if error := load_error("fbgemm_gpu", "torchrec"):
        raise ImportError(_explain(found, f"they do not load: {error}")) from error


def load_error(*modules: str) -> ImportError | OSError | None:
    """What the first of ``modules`` that cannot be imported raises; None if all can."""
    try:
        for module in modules:
            import_module(module)
    except (ImportError, OSError) as error:
        return error
    return None


def _explain(found: dict[str, str], what: str) -> str:
    have = ", ".join(f"{name} {version}" for name, version in found.items())
    want = ", ".join(f"{name} {version}" for name, version in TESTED.items())
    return f"Real TorchRec needs a matching set; {what}.\nFound: {have}. Tested: {want}.\n{FIX}"
