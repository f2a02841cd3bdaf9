"""Whether the bases of a deployment are what its replicas could serve, as far as this machine sees.

Goes in: Settings.  Comes out: nothing, or BadConfig.  Where the nodes alone have them, nobody asks.
"""

from pathlib import Path

from lorad.base import check_files
from lorad.config import Settings, model_key
from lorad.errors import BadConfig


def check_bases(settings: Settings) -> None:
    """Raises BadConfig for a folder that is not here, and for what a start would refuse of it."""
    for index, model in enumerate(settings.models):
        for key, folder in (("base", model.base), ("draft_model", model.draft_model)):
            if folder and not Path(folder).is_dir():
                raise BadConfig(
                    f"{model_key(index, key)}: {folder} is no folder on this machine",
                    hint="a folder with config.json in it; --elsewhere if only the nodes have it",
                )
    check_files(settings)
