"""Each rule against silent wrongness is broken on purpose, in a copy, and its tests must notice.

A guardian that passes over broken code guards nothing.  A break is a piece of source text and what
replaces it; text that is not there any more is an error, so breaks follow the code.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("engine", "lorad", "migrations", "tests", "demo", "pyproject.toml", "docs")


@dataclass(frozen=True)
class Break:
    rule: str
    file: str
    text: str
    broken: str
    guardian: str  # what pytest is asked to run


LIVES = "tests/unit/service/lifecycle/test_lives.py"
MIXED = "tests/integration/engine/test_mixed_batches.py"

BREAKS = (
    Break(
        "1 a reassigned slot is seen in the next step",
        "engine/adapters/plan.py",
        "if generation != row.generation:",
        "if slot not in self._views:",
        f"{MIXED}::test_a_slot_that_changes_hands_under_the_same_request_is_seen_at_once",
    ),
    Break(
        "2 LoRA never writes a base row",
        "engine/adapters/plan.py",
        "segments.append(Segment(row, end, slot))",
        "segments.append(Segment(max(row - 1, 0), end, slot))",
        f"{MIXED}::test_base_rows_keep_their_bits_when_adapters_become_base",
    ),
    Break(
        "3 new weights under a warm cache are a cold run",
        "engine/adapters/revision.py",
        'return self.rev if self.manifest.changes_kv else "base"',
        'return "base"',
        f"{MIXED}::test_new_weights_are_a_cold_run_with_nothing_cached",
    ),
    Break(
        "3a KV of an activated LoRA depends on where it was activated",
        "engine/memory/prefix.py",
        'data = parent + activation.to_bytes(8, "big") + identity.encode()',
        "data = parent + identity.encode()",
        "tests/unit/engine/test_prefix.py",
    ),
    Break(
        "3b an activated LoRA is no plain LoRA",
        "engine/admission.py",
        "wanted = () if submit.rev is None else residency.manifest(submit.rev).alora_tokens",
        "wanted = ()",
        "tests/unit/engine/test_scheduler_alora.py",
    ),
    Break(
        "4 a request ends on the revision it began with",
        "lorad/service/retiring.py",
        "return self._catalog.referenced(rev) or self._catalog.leases(rev) > 0",
        "return self._catalog.referenced(rev)",
        "tests/unit/service",
    ),
    Break(
        "5 unknown semantic fields are refused",
        "engine/adapters/peft_config.py",
        "if name not in known and not is_neutral(value):",
        "if False:",
        "tests/faults/adapter_files",
    ),
    Break(
        "6 scaling is computed once, from the true rank",
        "engine/adapters/peft_config.py",
        "return alpha / math.sqrt(rank) if self._settings.rslora else alpha / rank",
        "return alpha / rank",
        "tests/unit/adapter_files",
    ),
    Break(
        "7 an adapter equals its merged weights",
        "engine/kernels/lora.py",
        "y.addmm_((x @ a.t()).mul_(pair.scaling), b)",
        "y.addmm_((x @ a.t()).mul_(pair.scaling * 1.01), b)",
        "tests/parity/test_tiny_adapters.py",
    ),
    Break(
        "10 a loading adapter never answers with base weights",
        "engine/scheduler.py",
        "if seq.rev is not None and not self.residency.can_acquire(seq.rev):",
        "if False:",
        "tests/unit/engine/test_scheduler_steps.py",
    ),
    Break(
        "11 blocks change owner only after a cancelled load's copy has ended",
        "engine/adapters/copier.py",
        "            for i, block in enumerate(copy.blocks):\n",
        "            self._done.put(copy.rev)\n"
        "            for i, block in enumerate(copy.blocks):\n",
        "tests/integration/engine/test_steps.py",
    ),
    Break(
        "L1 what was on the GPU is there again after any number of deaths",
        "lorad/service/revival.py",
        '                    if error.code == "engine_restarting":\n'
        "                        return\n",
        "",
        "tests/unit/service/lifecycle",
    ),
    Break(
        "L2 a new engine knows nothing of what the old one knew",
        "lorad/service/engine_link.py",
        "        self.known.clear()\n",
        "",
        LIVES,
    ),
    Break(
        "L3 a name takes its candidate and no other revision",
        "lorad/service/registration.py",
        "unchanged = old == found.rev and waits in (None, found.rev)",
        "unchanged = old == found.rev",
        "tests/unit/service/lifecycle/test_deaths.py",
    ),
    Break(
        "L4 no revision stays in the engine that nobody can ask for",
        "lorad/service/revisions.py",
        "await self._link.call(RemoveRevision(self._link.next_id(), rev))",
        "pass",
        LIVES,
    ),
    Break(
        "L5 a request gives its lease back, however it ends",
        "lorad/service/reception.py",
        "            self._adapters.release(guest.rev)\n",
        "            pass\n",
        LIVES,
    ),
    Break(
        "L6 a copy that cannot begin gives its blocks back",
        "engine/adapters/loader.py",
        "            self.room.give_back(self.slots.free(row))\n            return error.message\n",
        "            self.slots.free(row)\n            return error.message\n",
        "tests/unit/engine/schedules/test_random_schedules.py",
    ),
    Break(
        "L7 a copy that was cut short is never served",
        "engine/adapters/loader.py",
        "if revision.cut_short or revision.evicts",
        "if revision.evicts",
        "tests/unit/engine/test_residency_leaving.py",
    ),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    return folder


def run(copy: Path, guardian: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", guardian]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.rule.split()[0])
def test_the_text_of_a_rule_is_where_it_is_to_be_broken(broken: Break) -> None:
    assert (ROOT / broken.file).read_text(encoding="utf-8").count(broken.text) == 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: b.rule.split()[0])
def test_a_broken_rule_is_noticed_by_its_guardian(copy: Path, broken: Break) -> None:
    file = copy / broken.file
    whole = file.read_text(encoding="utf-8")
    assert whole.count(broken.text) == 1, f"{broken.file}: the text to break is not there"
    untouched = run(copy, broken.guardian)
    assert untouched.returncode == 0, untouched.stdout[-2000:]
    try:
        file.write_text(whole.replace(broken.text, broken.broken), encoding="utf-8")
        result = run(copy, broken.guardian)
    finally:
        file.write_text(whole, encoding="utf-8")
    assert result.returncode == 1, f"rule {broken.rule} was broken and nobody noticed"
    assert "failed" in result.stdout or "error" in result.stdout
