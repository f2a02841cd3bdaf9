"""AdapterFiles: how this daemon copies, inspects and packs, with its settings and its engine.

Goes in: folders.  Comes out: copies, manifests and digests, packed files; or AdapterInvalid with
its E_ reason.  The engine's own rules decide, plus one of ours: a chat template must work.
"""

from pathlib import Path

import msgspec

from engine.adapters.peft import (
    AdapterManifest,
    Limits,
    base_text,
    inspect,
    inspect_text,
    revision_digest,
)
from engine.client import BaseSpec, pack, verify
from engine.errors import AdapterInvalid
from engine.messages import PackedManifest
from engine.verify_messages import Verified
from lorad.config import Settings
from lorad.errors import LoradError
from lorad.registry.records import TextFacts
from lorad.registry.store import StagingDir
from lorad.service.seams import Informed
from lorad.sources.local import LocalSourceError, copy_folder
from lorad.text.own_tokenizer import OwnTokenizers, told
from lorad.text.template import ChatTemplate, find_templates
from lorad.text.tokenizer import TextError, read_specials
from lorad.text.tokenizer_file import REMOVE

RESAVE = f"save the tokenizer again, or {REMOVE}"
OWN_TEMPLATE = "its chats are rendered with its own chat template, which is not the base model's"


class AdapterFiles:
    """Of one model, by its place in the configuration: `spec` is its own, and its files are in
    `base`."""

    def __init__(
        self,
        settings: Settings,
        base: Path,
        spec: BaseSpec,
        link: Informed,
        index: int = 0,
        *,
        tokenizers: OwnTokenizers | None = None,
    ) -> None:
        """`tokenizers` reads those of adapters' own; None: such are not looked into."""
        self._tokenizers = tokenizers
        self._settings, self._base, self._spec, self._link = settings, base, spec, link
        self._index, self._base_text = index, ""
        self._limits = Limits(
            max_rank=settings.lora.max_rank, max_bytes=settings.watch.max_adapter_bytes
        )

    def copy(self, folder: Path, staging: StagingDir) -> None:
        """The adapter files of an inbox folder, by descriptor and within the limits."""
        self._copy(folder, staging, [Path(self._settings.watch.dir)])

    def copy_named(self, folder: Path, staging: StagingDir) -> None:
        """The same of a folder that an operator names, who may name more than the inbox."""
        roots = (self._settings.watch.dir, *self._settings.lora.allowed_roots)
        self._copy(folder, staging, [Path(root) for root in roots])

    def _copy(self, folder: Path, staging: StagingDir, roots: list[Path]) -> None:
        try:
            copy_folder(
                folder,
                staging.path,
                roots=roots,
                max_bytes=self._settings.watch.max_adapter_bytes,
            )
        except LocalSourceError as error:
            if error.code.startswith("E_"):
                raise AdapterInvalid(error.code, error.message, hint=error.hint) from error
            raise LoradError(error.code, error.message, hint=error.hint) from error

    def inspect(self, folder: Path, /) -> tuple[AdapterManifest, str]:
        """Manifest and digest.  Runs in a thread."""
        dtype = self._settings.models[self._index].dtype
        manifest = inspect(folder, self._spec, self._limits, served_dtype=dtype, base=self._base)
        if manifest.base_text and manifest.base_text != self.base_text():
            raise AdapterInvalid(
                "E_TOKENIZER_INVALID",
                "the base's own tokenizer files were changed since lorad started, and texts are "
                "read by the former",
                hint="restart lorad; what it refused is looked at again",
            )
        try:
            template = ChatTemplate.load(folder)
        except TextError as error:
            message = f"chat template: {told(error, folder, self._base)}"
            hint = error.hint or "mend it, or remove it to use the base's"
            raise AdapterInvalid("E_TOKENIZER_INVALID", message, hint=hint) from error
        try:
            read_specials(folder)
        except TextError as error:
            raise self._invalid(error, folder) from error
        if manifest.own_tokenizer and self._tokenizers is not None:
            self._read_tokenizer(self._tokenizers, folder, manifest)
        digest = revision_digest(folder, manifest)
        # transformers writes one beside any tokenizer that it saves: mostly a copy.
        if template is not None and template.sources != find_templates(self._base):
            warnings = (*manifest.warnings, OWN_TEMPLATE)
            manifest = msgspec.structs.replace(manifest, warnings=warnings)
        return manifest, digest

    def base_text(self) -> str:
        """What the base's files are to the question whose tokenizer an adapter has, as they were
        when this was first asked: texts are read by those."""
        if not self._base_text:
            self._base_text = base_text(self._spec, self._base)
        return self._base_text

    def look_at_text(self, folder: Path) -> TextFacts:
        """Of a stored folder, whose tokenizer it has.  Runs in a thread."""
        found = inspect_text(folder, self._spec, self._limits, base=self._base)
        return TextFacts(
            num_tokens=found.num_tokens, own_tokenizer=found.own, base_text=found.base_text
        )

    def _read_tokenizer(
        self, tokenizers: OwnTokenizers, folder: Path, manifest: AdapterManifest
    ) -> None:
        """Now, and not when the first request waits for it; it is kept until then."""
        try:
            own, _ = tokenizers.read(folder)
        except TextError as error:
            raise self._invalid(error, folder) from error
        if own.vocab_size > manifest.num_tokens:
            message = f"ids up to {own.vocab_size - 1}, and {manifest.num_tokens} were found"
            raise AdapterInvalid("E_TOKENIZER_INVALID", f"tokenizer.json: {message}", hint=RESAVE)

    def _invalid(self, error: TextError, folder: Path) -> AdapterInvalid:
        """The folder is a copy of no name, which nobody who reads this knows."""
        message = told(error, folder, self._base)
        return AdapterInvalid("E_TOKENIZER_INVALID", message, hint=error.hint or RESAVE)

    async def pack(self, folder: Path, out: Path) -> PackedManifest:
        """For the layout of the engine that runs now."""
        info = self._link.info
        assert info is not None, "packing waits for the engine to say its layout"
        return await pack(
            folder,
            model=self._base,
            block_size=info.block_size,
            dtype=info.dtype,
            out_dir=out,
            max_rank=self._settings.lora.max_rank,
            purpose=info.purpose,
            draft_bytes=info.draft_block_bytes,
            ranks=info.tensor_parallel,
            extra_vocab=info.extra_vocab,
        )

    async def verify(self, folder: Path, out: Path, probe: Path, packed: Path | None) -> Verified:
        """Write the probe file of a stored folder; with `packed`, pack afresh into `out` too."""
        info = self._link.info
        assert info is not None, "the engine says its layout before anything is resident"
        if info.tensor_parallel > 1:
            message = f"tensor_parallel = {info.tensor_parallel}: what serves is in parts"
            hint = "loractl inspect DIR checks its files; an engine on one GPU verifies"
            raise LoradError("conflict", message, hint=hint)
        return await verify(
            folder,
            model=self._base,
            block_size=info.block_size,
            dtype=info.dtype,
            out_dir=out,
            probe=probe,
            packed=packed,
            max_rank=self._settings.lora.max_rank,
            purpose=info.purpose,
            draft_bytes=info.draft_block_bytes,
            extra_vocab=info.extra_vocab,
        )
