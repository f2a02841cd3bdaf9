"""What follows from a lorad.toml for its replicas, and the file that says so to Serve."""

import tomllib
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from lorad.errors import BadConfig
from lorad.ray.plan import Wish, check_open, lasting, numbers_of, plan, wish_of
from lorad.ray.serve_file import arguments, as_yaml, serve_file

CONFIG = """[[models]]
base = "/models/that/is/on/the/nodes"
max_num_seqs = 32

[limits]
queue = 100

[shutdown]
drain_timeout = "7s"
"""


def wish_for(config: str = CONFIG, **more) -> Wish:
    return Wish(config=config, catalog="/shared/adapters", **more)


def test_a_replica_takes_all_that_its_daemon_takes_and_calls_of_operators_besides() -> None:
    found = plan(wish_for())
    assert found.seats == 32
    assert found.max_ongoing > 32 + 100
    assert found.drain_seconds == 7.0


def test_it_asks_for_as_many_gpus_as_its_engines_use() -> None:
    two = CONFIG.replace("max_num_seqs", "replicas = 2\ntensor_parallel = 2\nmax_num_seqs")
    assert plan(wish_for(two)).gpus == 4
    assert plan(wish_for(two)).seats == 64
    assert plan(wish_for(CONFIG.replace("max_num", 'device = "cpu"\nmax_num'))).gpus == 0
    assert plan(wish_for(two, gpus=0.5)).gpus == 0.5


def test_the_models_files_need_not_be_where_it_is_deployed_from() -> None:
    base = tomllib.loads(CONFIG)["models"][0]["base"]
    assert not Path(base).exists() and plan(wish_for()).seats == 32


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (wish_for("[[models]"), "lorad.toml"),
        (wish_for(CONFIG + "tpyo = 1"), "unknown key shutdown.tpyo"),
        (wish_for(replicas=0), "replicas"),
        (wish_for(max_replicas=3), "1 <= min <= max"),
        (wish_for(min_replicas=3, max_replicas=2), "1 <= min <= max"),
        (wish_for(homes="here"), "absolute"),
        (Wish(config=CONFIG, catalog="adapters"), "neither"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_deployed(wish, words) -> None:
    with pytest.raises(BadConfig, match=words):
        plan(wish)


def test_to_listen_to_everybody_needs_keys() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_open(wish_for(), host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "node.example.com"):
        with pytest.raises(BadConfig, match="api_keys_file"):
            check_open(wish_for(), host)
        check_open(wish_for(CONFIG + '[tcp]\napi_keys_file = "/keys"\n'), host)


def test_unknown_arguments_are_refused_by_name() -> None:
    with pytest.raises(BadConfig, match="replica_count"):
        wish_of({"config": CONFIG, "replica_count": 2})


def test_the_file_for_serve_says_the_same_as_the_options() -> None:
    wish = wish_for(cpus=2.0, min_replicas=1, max_replicas=4, ingresses=2)
    text = as_yaml(serve_file(plan(wish), app="lorad", host="0.0.0.0", port=8001))
    assert "config: |\n" in text  # a person can read and change it
    with_numbers = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0]
    assert with_numbers.import_path == "lorad.ray.app:build"
    assert wish_of(with_numbers.args) == lasting(wish)
    replica, ingress = with_numbers.deployments
    assert replica.autoscaling_config["max_replicas"] == 4
    assert replica.autoscaling_config["target_ongoing_requests"] == 32
    assert ingress.num_replicas == 2


def test_other_numbers_of_replicas_leave_the_arguments_as_they_are() -> None:
    few, many = plan(wish_for(replicas=2)), plan(wish_for(min_replicas=1, max_replicas=9))
    assert arguments(lasting(few.wish)) == arguments(lasting(many.wish))
    assert numbers_of(few) == {"num_replicas": 2}
    assert "num_replicas" not in numbers_of(many)


def test_the_manifest_for_kubernetes_deploys_what_lorad_can_read() -> None:
    text = (Path(__file__).parents[3] / "docs/contrib/kubernetes/ray.yaml").read_text()
    file = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])
    args = file["applications"][0]["args"]
    told = plan(wish_of({**args, "min_replicas": 1, "max_replicas": 4}))
    assert told.gpus == 1
    assert file == serve_file(told, app="lorad", host="0.0.0.0", port=8000)
