"""What is said of a verification: a part of `engine/messages.py`.

Goes in: a revision, and where its probe lies.  Comes out: what is not as it should be.  Torch-free.
"""

from typing import Literal

from msgspec import Struct

#: More of what a verification found than this says nothing new.
MAX_FINDINGS = 16


class VerifyRevision(Struct, frozen=True, tag="verify_revision"):
    """Hold a resident revision against a file of `adapters/probe.py` and its own packed file.

    Answered with `Answer.report` when all was looked at, a little in each step; `conflict` if the
    revision is not on the GPU, or has to leave it meanwhile.
    """

    command_id: int
    rev: str
    probe: str  # path


class Finding(Struct, frozen=True, kw_only=True):
    """Something that is not as it should be.  `layer` -1: no one layer's."""

    what: Literal["effect", "resident", "packed", "stored", "tokenizer"]
    layer: int = -1
    module: str = ""
    message: str = ""


class VerifyReport(Struct, frozen=True, kw_only=True):
    """What a verification looked at, and what it found; no findings: all is well.

    An error is the largest difference of a module's output over the largest expected output.
    """

    modules: int = 0  # whose effect was compared
    worst_error: float = 0.0
    worst_layer: int = -1
    worst_module: str = ""
    tolerance: float = 0.0
    bytes_checked: int = 0
    bytes_different: int = 0
    findings: tuple[Finding, ...] = ()  # the first MAX_FINDINGS
    slices: int = 0  # steps that did a part of it


class Verified(Struct, frozen=True, kw_only=True):
    """What the verifier process (`adapters/verify.py`) says of a stored folder."""

    rev: str  # what its content is called now
    num_tokens: int = 0  # as the files say now; see AdapterManifest
    own_tokenizer: bool = False
    bytes_checked: int = 0  # of the packed file, against a fresh one
    bytes_different: int = 0
    findings: tuple[Finding, ...] = ()
