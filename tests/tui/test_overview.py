"""The overview on a terminal: what it shows at which size."""


def test_every_slot_that_there_is_room_for_is_a_line(play, boards):
    async def act(stage):
        shown = stage.lines()
        for name in boards.small().slots:
            assert any(name in line for line in shown), name
        assert all(len(line) == 120 for line in shown)

    play(act, boards.small())
