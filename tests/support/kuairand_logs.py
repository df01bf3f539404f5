"""Made-up logs in KuaiRand's format, and loading them."""

from __future__ import annotations

from pathlib import Path

from nestpipe.config import DataConfig, ModelConfig
from nestpipe.datasets.loader import load_dataset

COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)


def row(user, video, time_ms) -> str:
    return f"{user},{video},20220408,1200,{time_ms}" + ",0" * 13 + ",1"


def write(folder: Path, **files: list[str]) -> Path:
    for name, lines in files.items():
        (folder / f"log_standard_{name}.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    return folder


def load(folder: Path, on_bad_row="error", **options):
    data = DataConfig(dataset="kuairand", data_path=str(folder), on_bad_row=on_bad_row, **options)
    return load_dataset(data, ModelConfig(sequence_length=4), seed=1)


#: Rows of two users; user 1 has a test item.
GOOD = [row(1, 10, 1), row(1, 11, 2), row(2, 10, 3)]
