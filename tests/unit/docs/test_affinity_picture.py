"""The picture of the router is drawn from the figures that were measured last."""

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[3] / "docs"


def test_the_picture_is_that_of_the_data():
    spec = importlib.util.spec_from_file_location("picture", DOCS / "affinity_picture.py")
    assert spec is not None and spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    lines = [json.loads(line) for line in picture.DATA.read_text(encoding="utf-8").splitlines()]
    drawn = picture.draw(picture.means(lines))
    assert drawn == picture.PICTURE.read_text(encoding="utf-8"), "python docs/affinity_picture.py"
    words = "".join(ElementTree.fromstring(drawn).itertext())
    assert all(policy in words for policy in ("affinity", "consistent", "round-robin", "random"))
