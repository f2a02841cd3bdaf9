"""What `lorad gateway` is told: members, and who may come."""

import pytest

from lorad.config import Settings
from lorad.errors import BadConfig
from lorad.fleet.line import Site
from lorad.fleet.serving import Wanted, run, site_of, sites_of


def test_a_member_is_a_folder_of_sockets_or_two_urls():
    sockets = Site("a", "/run/lorad/inference.sock", "/run/lorad/admin.sock")
    assert site_of("a=/run/lorad", "key") == sockets
    assert site_of("b=http://h:1,http://h:2", "key") == Site("b", "http://h:1", "http://h:2", "key")
    for word in ("", "a", "=x", "a=", "a/b=/x"):
        with pytest.raises(BadConfig, match="is no member"):
            site_of(word)
    with pytest.raises(BadConfig, match="same name"):
        sites_of(["a=/x", "a=/y"])


def test_members_that_ask_for_no_key_are_not_opened_to_other_machines(tmp_path):
    wanted = Wanted(
        sites=sites_of([f"a={tmp_path}"]),
        catalog=str(tmp_path / "c"),
        folder=tmp_path / "g",
        bind="0.0.0.0:0",
    )
    with pytest.raises(BadConfig, match="without --api-keys"):
        run(wanted, Settings())
    assert not (tmp_path / "g").exists()
