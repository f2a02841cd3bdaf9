"""Pulls by the fetchers that a daemon has, from servers that are small but real."""

import hashlib
import importlib.util
import io
import logging
import sys
import zipfile
from pathlib import Path

import pytest

from lorad.config import Settings
from lorad.config_sections import S3, HuggingFace, Pull, Watch
from lorad.errors import LoradError
from lorad.service.fetching import Fetching, Refetch
from lorad.service.pulls import Pulls
from lorad.sources.choice import fetcher_for

COMMIT, NEWER = "a" * 40, "b" * 40


def _load():
    path = Path(__file__).parents[3] / "fakes" / "source_server.py"
    spec = importlib.util.spec_from_file_location("source_server_of_pulls", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


servers = _load()


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No variable, token or cache of whoever runs the tests."""
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


def attach(scene, endpoint="", store=""):
    """Let the scene fetch as a daemon does, from a hub or from an S3 store."""
    settings = Settings(
        watch=Watch(max_adapter_bytes=1 << 20),
        hf=HuggingFace(endpoint=endpoint, cache_dir=str(scene.world.dir / "cache")),
        pull=Pull(timeout=5.0),
        s3=S3(endpoint=store, region="us-east-1"),
    )

    def given(reference, /, *, token, offline):
        return fetcher_for(reference, settings, token=token, offline=offline)

    scene.fetching = Fetching(given)
    world = scene.world
    scene.pulls = Pulls(scene.operations, scene.fetching, world.adapters, world.names, world.intake)
    world.revisions.files.refetch = Refetch(
        scene.fetching, world.registry, world.intake, stopping=lambda: False
    )


def files(scene, n):
    return {**scene.adapter(n), "README.md": b"# not for lorad", "optimizer.pt": b"x" * 999}


def test_a_repository_is_pulled_with_its_token_refetched_and_found_offline(scene):
    async def scenario(s):
        with servers.HubServer("acme/sql", COMMIT, files(s, 1)) as hub:
            hub.token = "hf_ours"
            attach(s, hub.url)
            denied = await s.pull("hf:acme/sql")
            assert (denied.state, denied.code) == ("failed", "source_denied")
            done = await s.pull("hf:acme/sql", token="hf_ours")
            assert (done.state, done.commit, done.rev) == ("done", COMMIT, s.world.rev(1))
            there = {p.name for p in s.world.store.path(done.rev).iterdir()}
            assert there >= {"adapter_config.json", "adapter_model.safetensors"}
            assert not there & {"README.md", "optimizer.pt"}
            assert s.staged() == []
            hub.token = ""
            assert await s.world.revisions.unpack(done.rev, (), remote=True) > 0
            staging = await s.world.revisions.files.refetch("sql")
            assert {p.name for p in staging.path.iterdir()} == set(s.adapter(1))
            dynamic = s.dynamic("hf:acme/*")
            assert await dynamic.find("hf:acme/sql", 5.0) == "sql"
            hub.commits[NEWER], hub.refs["main"] = files(s, 2), NEWER
            name = await s.dynamic("hf:acme/*").find("hf:acme/sql@main", 5.0)
            assert name == f"hf:acme/sql@{NEWER}"
        away = await s.pull("hf:acme/sql", name="away", offline=True)
        assert (away.state, away.commit) == ("done", NEWER)  # from the cache; nobody listens

    scene(scenario)


def test_an_archive_is_pulled_under_the_checksum_that_it_was_given(scene):
    def archive(s, n):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as out:
            for name, data in s.adapter(n).items():
                out.writestr(name, data)
        return made.getvalue()

    async def scenario(s):
        with servers.FileServer() as web:
            attach(s)
            web.files["/my/SQL.zip"] = first = archive(s, 1)
            url = f"{web.url}/my/SQL.zip"
            done = await s.pull(url)
            assert (done.state, done.name, done.rev) == ("done", "sql", s.world.rev(1))
            again = await s.pull(url)  # only a look can tell that it is the same
            assert (again.state, again.rev, again.message) == ("done", done.rev, "")
            pinned = f"{url}#sha256={hashlib.sha256(first).hexdigest()}"
            assert (await s.pull(pinned, name="pinned")).state == "done"
            web.files["/my/SQL.zip"] = archive(s, 2)
            assert (await s.pull(url)).code == "name_taken"
            assert (await s.pull(pinned, name="another")).code == "source_corrupt"
            assert (await s.pull(url, replace=True)).rev == s.world.rev(2)
            assert s.staged() == []

    scene(scenario)


def test_a_prefix_of_a_store_is_pulled_served_by_its_reference_and_refetched(scene, monkeypatch):
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "somebody")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket="ours")

    def put(s, prefix, n):
        for name, data in files(s, n).items():
            client.put_object(Bucket="ours", Key=f"{prefix}/{name}", Body=data)

    async def scenario(s):
        attach(s, store=url)
        put(s, "loras/sql", 1)
        done = await s.pull("s3://ours/loras/sql")
        assert (done.state, done.name, done.rev) == ("done", "sql", s.world.rev(1))
        assert set(s.adapter(1)) <= {p.name for p in s.world.store.path(done.rev).iterdir()}
        staging = await s.world.revisions.files.refetch("sql")
        assert {p.name for p in staging.path.iterdir()} == set(s.adapter(1))
        put(s, "asked/legal", 2)
        dynamic = s.dynamic("s3://ours/asked/*")
        asked = "s3://ours/asked/legal"
        name = await dynamic.find(asked, 30.0)
        assert name.startswith(asked) and s.world.adapters.resolve(name).rev == s.world.rev(2)
        assert await dynamic.find(asked, 0.0) == name  # it is here now
        put(s, "elsewhere/legal", 3)
        with pytest.raises(LoradError, match="does not exist"):  # what the policy does not name
            s.world.adapters.resolve(await dynamic.find("s3://ours/elsewhere/legal", 5.0))
        missing = await s.pull("s3://ours/loras/nothing")
        assert (missing.state, missing.code) == ("failed", "source_not_found")

    try:
        scene(scenario)
    finally:
        server.stop()
