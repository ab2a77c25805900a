"""Cells of a notebook: one that fails inside a forward leaves its frames in sys.last_traceback, and in them the engine
and its units."""

from __future__ import annotations

import code
import gc
import sys
import unittest
import weakref

sys.ps1 = (
    "In: "  # as IPython and the interactive Python have it before anything is imported: sys.excepthook stays theirs
)

import zoo  # noqa: E402
from alone import BATCH, config  # noqa: E402

SETUP = """
import zeroth

def build(stage):
    return zeroth.Engine(model, config(stage), log_level="off")

def train(steps):
    for _ in range(steps):
        loss = engine(*BATCH)
        losses.append(loss.item())
        engine.backward(loss)
        assert engine.step().committed

def fail(forward, error):
    def refuse(module, args):
        raise error

    handle = model.blocks[1].linear.register_forward_pre_hook(refuse)
    try:
        forward(*BATCH)
    finally:
        handle.remove()

losses = []
model = zoo.make("plain")
"""
FAILURES = ("fail(engine, ValueError('not today'))", "fail(model, KeyboardInterrupt())")


class Hook(unittest.TestCase):
    def test_it_is_not_ours(self) -> None:
        self.assertIs(sys.excepthook, sys.__excepthook__)


class Notebook(code.InteractiveInterpreter):
    """Runs cells as an interactive Python does, which keeps the last traceback."""

    def __init__(self) -> None:
        super().__init__({"zoo": zoo, "config": config, "BATCH": BATCH})
        self.told = ""
        self.run(SETUP)

    def write(self, data: str) -> None:
        self.told += data

    def run(self, cell: str) -> str:
        """The last line of what the cell said, if it failed."""
        self.told = ""
        self.runsource(cell, "<cell>", "exec")
        return self.told.strip().rpartition("\n")[2]

    def run_all(self, *cells: str) -> list[float]:
        """All losses so far. No cell may fail."""
        for cell in cells:
            if self.run(cell):
                raise AssertionError(self.told)
        losses: list[float] = self.locals["losses"]
        return losses


def forget_traceback() -> None:
    for name in ("last_traceback", "last_value", "last_type", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()  # frames and exceptions know each other


class NotebookTest(unittest.TestCase):
    def setUp(self) -> None:
        self.addCleanup(forget_traceback)

    def failed(self, stage: int, cell: str) -> Notebook:
        """After two steps and a cell that failed in a forward."""
        notebook = Notebook()
        notebook.run_all(f"engine = build({stage})", "train(2)")
        self.assertRegex(notebook.run(cell), "^(ValueError: not today|KeyboardInterrupt)$")
        self.assertIsNotNone(sys.last_traceback)
        return notebook

    def test_the_same_module_goes_on_at_another_stage(self) -> None:
        another_stage = ("train(1)", "engine.close()", "del engine")
        for first, second in ((3, 0), (0, 3)):
            expected = Notebook().run_all(
                f"engine = build({first})", "train(2)", *another_stage, f"engine = build({second})", "train(3)"
            )
            self.assertEqual(len(expected), 6)
            for cell in FAILURES:
                with self.subTest(first=first, second=second, cell=cell):
                    notebook = self.failed(first, cell)
                    self.assertEqual(
                        notebook.run_all(*another_stage, f"engine = build({second})", "train(3)"), expected
                    )

    def test_a_new_module_goes_on_beside_what_the_traceback_holds(self) -> None:
        anew = ("model, losses = zoo.make('plain'), []", "engine = build(0)", "train(3)")
        expected = Notebook().run_all(*anew)
        for cell in FAILURES:
            with self.subTest(cell):
                notebook = self.failed(3, cell)
                first = weakref.ref(notebook.locals["engine"])
                self.assertEqual(notebook.run_all("del engine", *anew), expected)
                self.assertEqual(first() is not None, "engine" in cell)
                forget_traceback()
                self.assertIsNone(first())
                self.assertEqual(len(set(notebook.run_all("train(1)"))), 4)  # and its end was none of the second one's

    def test_a_module_that_the_traceback_holds_is_refused_with_the_way_out(self) -> None:
        notebook = self.failed(3, FAILURES[0])
        told = notebook.run("del engine\nengine = build(0)")
        self.assertRegex(told, r"in an engine already.*which: first\.weight.*close\(\).*sys\.last_traceback")


if __name__ == "__main__":
    unittest.main(verbosity=2)
