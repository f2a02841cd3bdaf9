"""The files that a system is set up with: units, groups, folders, an image."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lorad import errors
from lorad.api.app import OPEN
from lorad.config_sections import Admin, Inference, Shutdown
from lorad.config_sources import load
from lorad.config_values import parse_duration

CONTRIB = Path(__file__).resolve().parents[3] / "docs" / "contrib"
SYSTEMD = CONTRIB / "systemd"
UNITS = sorted(path for path in SYSTEMD.rglob("*") if path.suffix in (".service", ".socket"))

#: What systemd 253 and later know, of what these units use (systemd.unit, .service, .socket, .exec,
#: .kill, .resource-control); whatever else is written is a slip.
KNOWN = {
    "Unit": "After Description StartLimitBurst StartLimitIntervalSec Wants",
    "Install": "WantedBy",
    "Socket": (
        "Backlog DirectoryMode FileDescriptorName ListenStream RemoveOnStop Service SocketGroup"
        " SocketMode SocketUser"
    ),
    "Service": (
        "AmbientCapabilities CacheDirectory CacheDirectoryMode CapabilityBoundingSet"
        " ConfigurationDirectory ConfigurationDirectoryMode DeviceAllow DevicePolicy ExecStart"
        " Group KillMode LimitCORE LimitMEMLOCK LimitNOFILE LoadCredential LockPersonality"
        " MemoryDenyWriteExecute NoNewPrivileges NotifyAccess OOMPolicy PrivateDevices PrivateTmp"
        " ProtectClock ProtectControlGroups ProtectHome ProtectHostname ProtectKernelLogs"
        " ProtectKernelModules ProtectKernelTunables ProtectSystem Restart"
        " RestartPreventExitStatus RestartSec RestrictAddressFamilies RestrictNamespaces"
        " RestrictRealtime RestrictSUIDSGID RuntimeDirectory RuntimeDirectoryMode"
        " RuntimeDirectoryPreserve Sockets StateDirectory StateDirectoryMode SupplementaryGroups"
        " SystemCallArchitectures TimeoutStartSec TimeoutStopSec Type UMask User WatchdogSec"
    ),
}


def read(path):
    """{section: {key: [values]}}"""
    sections, current = {}, None
    for line in path.read_text().splitlines():
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line):
            current = sections.setdefault(match[1], {})
            continue
        key, equals, value = line.partition("=")
        assert equals and current is not None, f"{path.name}: {line}"
        current.setdefault(key, []).append(value)
    return sections


@pytest.fixture(params=["lorad.service", "user/lorad.service"])
def service(request):
    return read(SYSTEMD / request.param)["Service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: str(path.relative_to(SYSTEMD)))
def test_every_directive_is_one_that_systemd_knows_in_that_section(path):
    for section, keys in read(path).items():
        assert set(keys) <= set(KNOWN[section].split()), f"[{section}]"


def test_both_services_follow_the_daemons_manners(service):
    assert service["Type"] == ["notify-reload"]
    assert service["KillMode"] == ["mixed"]
    assert service["Restart"] == ["on-failure"]
    assert service["WatchdogSec"] == ["30"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["LimitCORE"] == ["0"], "a core holds prompts and keys"
    assert shlex.split(service["ExecStart"][0])[1:] == ["serve"]


def test_a_stop_may_take_longer_than_the_drain(service):
    assert float(service["TimeoutStopSec"][0]) > Shutdown().drain_timeout
    assert parse_duration(f"{service['WatchdogSec'][0]}s") > 0


def test_what_another_start_cannot_mend_is_not_tried_again(service):
    kinds = (
        errors.BadConfig,
        errors.RegistryUnusable,
        errors.NoUsableDevice,
        errors.LockHeld,
    )
    never = {str(kind.exit) for kind in kinds}
    assert set(service["RestartPreventExitStatus"][0].split()) == never


def test_the_system_service_is_fenced_in_as_far_as_cuda_and_triton_allow():
    service = read(SYSTEMD / "lorad.service")["Service"]
    wanted = {
        "User": "lorad",
        "LimitMEMLOCK": "infinity",
        "UMask": "0027",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "no",
        "MemoryDenyWriteExecute": "no",
        "DeviceAllow": "char-nvidia* rw",
        "StateDirectory": "lorad",
        "CacheDirectory": "lorad",
        "RuntimeDirectory": "lorad",
        "ConfigurationDirectory": "lorad",
        "RuntimeDirectoryPreserve": "yes",  # else the sockets go with the service
    }
    assert {key: service[key][0] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "section", "group"),
    [("inference", Inference(), "lorad"), ("admin", Admin(), "lorad-admin")],
)
def test_a_socket_unit_makes_the_socket_that_lorad_would(name, section, group):
    unit = read(SYSTEMD / f"lorad-{name}.socket")["Socket"]
    assert unit["ListenStream"] == [f"/run/lorad/{name}.sock"]
    assert unit["FileDescriptorName"] == [name]
    assert (unit["SocketMode"], unit["SocketGroup"]) == ([section.mode], [group])
    service = read(SYSTEMD / "lorad.service")["Service"]
    assert f"lorad-{name}.socket" in service["Sockets"][0].split()
    assert group in (*service["Group"], *service["SupplementaryGroups"])


def test_the_users_and_groups_that_units_name_are_made():
    made = {}
    for line in (SYSTEMD / "lorad.sysusers.conf").read_text().splitlines():
        if line and line[0] != "#":
            kind, name, *rest = shlex.split(line)
            made.setdefault(kind, []).append((name, *rest))
    assert {name for name, *_ in made["g"]} == {"lorad", "lorad-admin"}
    assert [(name, rest[-1]) for name, *rest in made["u"]] == [("lorad", "/var/lib/lorad")]
    assert ("lorad", "lorad-admin") in made["m"]


def test_folders_that_are_made_agree_with_the_service():
    made = {}
    for line in (SYSTEMD / "lorad.tmpfiles.conf").read_text().splitlines():
        if line and line[0] != "#":
            kind, path, mode, user, group, age = line.split()
            assert (kind, age) == ("d", "-")
            made[path] = (mode, user, group)
    service = read(SYSTEMD / "lorad.service")["Service"]
    for kind, path in (("Runtime", "/run"), ("State", "/var/lib"), ("Cache", "/var/cache")):
        mode = service[f"{kind}DirectoryMode"][0]
        assert made[f"{path}/{service[f'{kind}Directory'][0]}"] == (mode, "lorad", "lorad")
    assert made["/etc/lorad/secrets"] == ("0700", "root", "root")


def test_what_the_image_copies_is_in_the_repository():
    root = CONTRIB.parents[1]
    text = (CONTRIB / "docker" / "Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    for name in (name for names in copied for name in names if "--from" not in names[0]):
        assert (root / name).exists(), name
    assert "USER lorad" in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: str(path.relative_to(SYSTEMD)))
def test_systemd_itself_finds_nothing_wrong(path, tmp_path):
    scope = ["--user"] if "user" in path.parts else []
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *scope, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    # what is not installed here, and a type that came with systemd 253
    beside = re.compile(r"is not executable|not found|service type, ignoring: notify-reload")
    assert [line for line in done.stderr.splitlines() if not beside.search(line)] == []


@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="there is no systemd-sysusers")
def test_systemd_would_make_the_users_and_groups():
    snippet = str(SYSTEMD / "lorad.sysusers.conf")
    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", snippet], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "lorad.sysusers.conf:" not in done.stderr, "no line is one that it cannot read"


# ----------------------------------------------------------------- Kubernetes
def manifests():
    """{kind: document} of lorad.yaml."""
    text = (CONTRIB / "kubernetes/lorad.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_manifests_configuration_is_one_that_lorad_takes(tmp_path):
    data = manifests()["ConfigMap"]["data"]
    model, keys = tmp_path / "model", tmp_path / "api-keys"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    config = tmp_path / "lorad.toml"
    text = data["lorad.toml"].replace('"/model"', f'"{model}"')
    config.write_text(text.replace("/run/secrets/lorad/api-keys", str(keys)))
    kinds = ("CONFIGURATION", "STATE", "RUNTIME", "CACHE")
    env = {f"{kind}_DIRECTORY": str(tmp_path / kind.lower()) for kind in kinds}
    settings, _ = load(config, env)
    containers = {c["name"]: c for c in pod()["containers"]}
    ports = {port["name"]: port["containerPort"] for port in containers["lorad"]["ports"]}
    assert settings.tcp.bind.endswith(f":{ports['http']}")
    assert settings.metrics.tcp.endswith(f":{ports['metrics']}")
    gpus = containers["lorad"]["resources"]["limits"]["nvidia.com/gpu"]
    assert settings.models[0].replicas == gpus
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace > settings.shutdown.drain_timeout


def pod():
    return manifests()["StatefulSet"]["spec"]["template"]["spec"]


def test_the_pods_probes_are_routes_that_need_no_key():
    containers = {c["name"]: c for c in pod()["containers"]}
    probes = {k: v for k, v in containers["lorad"].items() if k.endswith("Probe")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= OPEN
    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_every_volume_that_the_pod_mounts_is_there_and_every_one_is_mounted():
    claimed = manifests()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    there = {v["name"] for v in pod()["volumes"]} | {c["metadata"]["name"] for c in claimed}
    mounted = {
        mount["name"]
        for container in (*pod()["initContainers"], *pod()["containers"])
        for mount in container["volumeMounts"]
    }
    assert mounted == there


def test_the_syncer_loads_what_is_missing_and_takes_away_what_is_to_go(tmp_path):
    """Its script, with a curl that writes down what is asked and a sleep that ends it."""
    data = manifests()["ConfigMap"]["data"]
    (tmp_path / "adapters").write_text(data["adapters"] + "here /adapters/here\nacme/none -\n")
    asked = tmp_path / "asked"
    curl = tmp_path / "curl"
    listed = json.dumps({"data": [{"id": "here"}, {"id": "acme/old"}]}, separators=(",", ":"))
    curl.write_text(
        f'#!/bin/sh\ncase "$*" in */v1/models) echo \'{listed}\' ;; *) echo "$@" >> {asked} ;; esac'
    )
    rounds = tmp_path / "rounds"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\n[ ! -e {rounds} ] && touch {rounds}\n")
    for tool in ("curl", "sleep"):
        (tmp_path / tool).chmod(0o755)
    script = data["sync.sh"].replace("/etc/lorad/adapters", str(tmp_path / "adapters"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script], env=env, timeout=20, check=False)
    lines = asked.read_text().splitlines()
    assert len(lines) == 2
    assert "unix-socket /run/lorad/admin.sock" in lines[0] and "/v1/load_lora_adapter" in lines[0]
    assert '{"lora_name": "acme/sql", "lora_path": "/adapters/acme-sql"}' in lines[0]
    assert "/v1/unload_lora_adapter" in lines[1] and '{"lora_name": "acme/old"}' in lines[1]


def test_the_pool_is_of_the_pods_and_their_port():
    pool = yaml.safe_load((CONTRIB / "kubernetes/inference-pool.yaml").read_text())["spec"]
    assert pool["selector"]["matchLabels"] == {"app": "lorad"}
    assert [port["number"] for port in pool["targetPorts"]] == [8411]
