import io
import re

from rich.console import Console

from micronorm.cli.board import Board, BoardRow

EPOCH = {"epoch": 0, "step": 2, "train": {"loss": 0.5}, "test": {"top1": 12.5, "loss": 0.4}}


def step(number: int, loss: float = 2.0) -> dict:
    return {"step": number, "epoch": 0, "loss": loss, "seconds": 0.25}


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width, color_system=None)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def go(row: BoardRow) -> None:
    row.on_start(2, 0, "")
    row.on_step(step(1))
    row.on_step(step(2))
    row.on_epoch(EPOCH)
    row.on_end()


def test_elsewhere_a_finished_run_is_a_line_and_the_table_comes_in_the_end():
    console, row = plain(), BoardRow("GN")
    with Board(console, [row]) as board:
        go(row)
        board.print_finished(row)
        assert output(console) == "GN: 12.50 % test error, 0.5 s\n"
    assert "\x1b" not in output(console)
    assert re.search(r"method +epoch +training loss +test error % +seconds", output(console))
    assert re.search(r"GN +1 +0\.5000 +12\.50 +0\.5", output(console))


def test_where_no_run_has_begun_there_is_no_table():
    console = plain()
    with Board(console, [BoardRow("GN")]):
        pass
    assert output(console) == ""


def test_a_terminal_gets_a_table_that_lives_and_then_stays():
    console, rows = terminal(), [BoardRow("BN"), BoardRow("GN")]
    with Board(console, rows) as board:
        go(rows[0])
        rows[1].on_start(2, 0, "")
        rows[1].on_step(step(1, loss=1.25))
        board.print_finished(rows[0])
    shown = output(console)
    assert "BN: 12.50" not in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    last = shown[shown.rindex("method") :]
    assert re.search(r"BN +━{14} +1 +0\.5000 +12\.50 +0\.5", last)
    assert re.search(r"GN +━{7}\S* +0 +1\.2500 +0\.2", last)  # half of its steps, and no test error yet


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console, row = Console(file=io.StringIO(), force_terminal=True, width=100), BoardRow("GN")
    with Board(console, [row]) as board:
        go(row)
        board.print_finished(row)
    assert output(console).startswith("GN: 12.50 % test error")


def test_an_interrupted_board_shows_how_far_each_run_came():
    console, rows = plain(), [BoardRow("BN"), BoardRow("GN")]
    try:
        with Board(console, rows):
            rows[0].on_start(4, 0, "")
            rows[0].on_step(step(1))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert re.search(r"BN +0 +2\.0000 +0\.2", output(console))
    assert re.search(r"GN +\n", output(console))
    assert rows[0].is_running
    assert not rows[1].is_running


def test_the_loss_is_that_of_a_step_before_the_first_epoch_ends_and_of_an_epoch_from_then_on():
    row = BoardRow("GN")
    go(row)
    row.on_step(step(3, loss=9.0))
    assert row.loss == 0.5


def test_on_eighty_columns_every_figure_is_whole():
    console, row = terminal(80), BoardRow("GroupNorm + WS, 1 at a time")
    with Board(console, [row]):
        go(row)
    last = output(console)[output(console).rindex("method") :]
    assert re.search(r"GroupNorm \+ WS, 1 at a time .* 1 +0\.5000 +12\.50 +0\.5", last)
