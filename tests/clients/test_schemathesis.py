"""schemathesis against both sockets' documents, through TCP: valid calls, invalid ones, chains.

`LORAD_FUZZ_EXAMPLES` is how many calls each route gets; the seed is always the same.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="make test-clients installs it"
    ),
]

HERE = Path(__file__).parent
EXAMPLES = os.environ.get("LORAD_FUZZ_EXAMPLES", "10")
CHECKS = [
    *("one_envelope", "only_known_failures"),  # of fuzz_hooks.py
    *("status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "allow_header_conformance"),
    "use_after_free",
]


@pytest.mark.parametrize("plane", ["inference", "admin"])
def test_every_answer_is_as_the_document_says_and_none_is_a_failure(
    daemon, free_ports, given, tmp_path, plane
):
    admin = plane == "admin"
    key = given.admin_key if admin else given.key
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run"),
        f"http://127.0.0.1:{free_ports[admin]}/openapi.json",
        *("--header", f"Authorization: Bearer {key}"),
        *("--seed", "7", "--max-examples", EXAMPLES, "--checks", ",".join(CHECKS)),
        *("--continue-on-failure", "--no-shrink", "--request-timeout", "120"),
        *("--suppress-health-check", "all", "--warnings", "off"),
        *("--exclude-path", "/admin/v1/stream"),  # has no end
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # where it leaves its notes
        env=os.environ
        | {
            "SCHEMATHESIS_HOOKS": "fuzz_hooks",
            "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parents[1]))),
            "LORAD_FUZZ_MODELS": "tooled acme/sql" if admin else "tiny tooled acme/sql",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    print(done.stdout[-600:])
    assert generated and int(generated[1]) > 300, "it has hardly tried anything"
    log = daemon.log.read_text()
    assert "Traceback" not in log and daemon.process.poll() is None
