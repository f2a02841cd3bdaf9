"""What an operator reads of folders in an adapter's."""

from pathlib import Path

from lorad.service.nested import line_of
from lorad.watch.inbox import describe

INBOX = Path("/inbox")


def test_of_folders_that_were_not_all_counted_no_exact_number_is_told() -> None:
    inside = [f"run-{n:04}" for n in range(1000)]
    for count, words in ((3, "and 2 more"), (1000, "and at least 15 more")):
        line = line_of(describe(INBOX, INBOX / "a", None, nested=inside[:count]))
        assert line.startswith(f"run-0000 {words} in its folder are not served")
