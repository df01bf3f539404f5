"""Files are written whole or not at all, and paths are checked before they are needed."""

from __future__ import annotations

import os

import pytest

from nestpipe.machine.files import NotWritable, require_writable, slug, write_atomically


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, function):
    path = tmp_path / "deep" / "record.json"
    write_atomically(path, "old\n")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_interrupt_in_mid_write_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "record.json", "new\n")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_reported_before_anything_runs(tmp_path):
    require_writable(tmp_path / "new" / "out.json")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match=r"cannot write into .*/file: it is not a folder"):
        require_writable(tmp_path / "file" / "out.json")
    with pytest.raises(NotWritable, match="is a folder"):
        require_writable(tmp_path)


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to("elsewhere/there.json")
    require_writable(link)
    write_atomically(link, "text")
    assert link.is_symlink() and (tmp_path / "elsewhere" / "there.json").read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe)
        write_atomically(pipe, "text")
        assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    finally:
        os.close(reader)


def test_bytes_that_need_not_be_on_disk_are_not_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_atomically(tmp_path / "a", b"\xff\x00", durable=False)
    assert (tmp_path / "a").read_bytes() == b"\xff\x00" and not synced
    write_atomically(tmp_path / "b", "täglich\n")
    assert (tmp_path / "b").read_bytes() == "täglich\n".encode() and synced


@pytest.mark.parametrize(
    ("text", "name"), [("nestpipe", "nestpipe"), ("serial(8)", "serial-8"), ("nestpipe+2d-sp", "nestpipe-2d-sp")]
)
def test_a_method_in_a_file_name(text, name):
    assert slug(text) == name
