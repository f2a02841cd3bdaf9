"""explain, from the socket to the step loop and back."""

import pytest

from lorad.client import ApiError


def test_an_adapter_is_explained_cold_and_warm_and_by_what_it_would_cost(make_daemon):
    daemon = make_daemon()
    daemon.start()
    daemon.upload("acme/cold", 1)
    daemon.upload("warm", 2)
    before = daemon.text("warm")
    with daemon.client() as client:
        cold = client.explain("acme/cold")
        assert (cold.state, cold.tier, cold.served) == ("registered", "disk", False)
        warm = client.explain("warm")
        assert (warm.state, warm.tier, warm.served) == ("idle", "gpu", True)
        assert (warm.cost.loads, warm.cost.place, warm.cost.victims) == (1, 1, 1)
        assert 0.5 < warm.cost.uses <= 1.0 and warm.cost.return_seconds > 0
        assert warm.room.total_bytes > warm.room.free_bytes > 0
        client.pin("warm")
        assert "pinned" in client.explain("warm").next
        client.unpin("warm")
        client.evict("warm")
        gone = client.explain("warm")
        assert (gone.state, gone.tier, gone.served) == ("ram", "ram", False)
        assert gone.next == "a request brings it up" and gone.next_seconds > 0
        assert gone.cost.evictions == 1 and gone.cost.uses == pytest.approx(warm.cost.uses, rel=0.1)
        with pytest.raises(ApiError) as caught:
            client.explain("nobody")
        assert caught.value.status == 404 and caught.value.code == "model_not_found"
    assert daemon.text("warm") == before
    assert daemon.stop() == 0
