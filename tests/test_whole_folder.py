"""A folder is there whole or not at all."""

import shutil
from pathlib import Path

import pytest

from sagebwd.whole_folder import make_whole


def write(name: str):
    return lambda folder: (folder / name).write_text(name)


def test_it_is_made_once(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "folder"
    make_whole(place, write("first"))
    make_whole(place, write("second"))
    assert [path.name for path in place.iterdir()] == ["first"]
    assert [path.name for path in place.parent.iterdir()] == ["folder"]
    assert place.stat().st_mode == place.parent.stat().st_mode


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        write("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_whole(tmp_path / "folder", fill)
    assert list(tmp_path.iterdir()) == []


def test_of_two_at_once_the_first_to_finish_gives_the_folder(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        make_whole(tmp_path / "folder", write("other"))
        write("mine")(folder)

    make_whole(tmp_path / "folder", fill)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_error_of_the_disk_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        make_whole(tmp_path / "folder", lambda folder: shutil.rmtree(folder))
