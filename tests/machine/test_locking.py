"""One process at a time: locks wait or refuse, and are free again once their holder has ended."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os

import pytest

from nestpipe.machine.locking import lock, sole_writer


class Refused(Exception):
    pass


def writer(folder):
    return sole_writer(folder, busy="somebody else writes", option="--folder", error=Refused)


def test_a_second_writer_is_refused_until_the_first_has_left(tmp_path):
    with writer(tmp_path / "deep" / "folder"):
        with pytest.raises(Refused, match="somebody else writes"), writer(tmp_path / "deep" / "folder"):
            pass
        with writer(tmp_path / "other"):
            pass
    with writer(tmp_path / "deep" / "folder"):
        pass


def test_a_folder_that_cannot_be_made_names_the_option(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with (
        pytest.raises(Refused, match=r"cannot write into .*file.*; choose another --folder"),
        writer(tmp_path / "file"),
    ):
        pass


def test_errors_of_the_work_itself_pass_unchanged(tmp_path):
    for error in (BlockingIOError("of the work"), OSError(errno.ENOSPC, "of the work")):
        with pytest.raises(type(error), match="of the work"), writer(tmp_path):
            raise error


def test_without_locks_a_folder_is_written_all_the_same(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with writer(tmp_path), writer(tmp_path):
        pass
    with pytest.raises(OSError, match="No locks"), lock(tmp_path / "file"):
        pass


def hold_and_die(file):
    with lock(file):
        os.kill(os.getpid(), 9)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=hold_and_die, args=(tmp_path / "lock",))
    child.start()
    child.join()
    assert child.exitcode == -9
    with lock(tmp_path / "lock", wait=False), pytest.raises(BlockingIOError), lock(tmp_path / "lock", wait=False):
        pass
