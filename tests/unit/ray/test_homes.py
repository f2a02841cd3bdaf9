"""Folders of a node that are one replica's at a time, and what its daemon is told of them."""

import os
from pathlib import Path

import pytest

from lorad.errors import BadConfig
from lorad.ray.child import environment, run_folder
from lorad.ray.homes import free


def test_a_home_is_one_process_at_a_time_and_the_first_free_one_again(tmp_path) -> None:
    first, second = next(free(tmp_path, "home")), next(free(tmp_path, "home"))
    assert [first.path.name, second.path.name] == ["home-0", "home-1"]
    (first.path / "packed").touch()
    first.release()
    again = next(free(tmp_path, "home"))
    assert again.path == first.path and (again.path / "packed").exists()
    other = next(free(tmp_path, "ingress"))
    assert other.path.name == "ingress-0"
    for home in (again, second, other):
        home.release()


def test_who_finds_a_home_unfit_gets_the_next(tmp_path) -> None:
    names = []
    for home in free(tmp_path, "home"):
        names.append(home.path.name)
        home.release()
        if len(names) == 3:
            break
    assert names == ["home-0", "home-1", "home-2"]


def test_homes_in_a_folder_of_somebody_else_are_refused(tmp_path, monkeypatch) -> None:
    next(free(tmp_path / "homes", "home")).release()
    if os.geteuid():
        monkeypatch.setattr("os.geteuid", lambda: 4711)
    else:
        os.chown(tmp_path / "homes", 4711, -1)
    with pytest.raises(BadConfig, match="belongs to uid"):
        next(free(tmp_path / "homes", "home"))


def test_sockets_are_in_the_home_unless_their_paths_would_be_too_long(tmp_path) -> None:
    home = tmp_path / "h"
    home.mkdir()
    assert run_folder(home) == home / "run"
    (home / "run" / "left-over").touch()
    assert list(run_folder(home).iterdir()) == []
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    elsewhere = run_folder(deep)
    assert len(str(elsewhere / "inference.sock")) <= 107
    elsewhere.rmdir()


def test_a_daemon_has_folders_of_its_own_and_the_gpus_that_ray_chose() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "3", "LORAD_STORE__DIR": "/shared", "LORAD_LORA__SLOTS": "9"}
    told = environment(env, Path("/homes/home-1"), Path("/run/x"))
    assert told["CUDA_VISIBLE_DEVICES"] == "3"
    assert told["STATE_DIRECTORY"] == "/homes/home-1/state"
    assert told["RUNTIME_DIRECTORY"] == "/run/x"
    assert told["LORAD_STORE__DIR"] == ""  # two of a node cannot share it
    assert told["LORAD_LORA__SLOTS"] == "9"
