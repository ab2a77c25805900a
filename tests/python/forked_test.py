"""The Python that has imported torch already ends, is told and leaves as one that has not: forked.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import unittest

import forked
import job
import tier

PROGRAMS = (
    ("pass", 0),
    ("import sys; sys.exit(3)", 3),
    ("import sys; sys.exit('a text')", 1),
    ("raise ValueError('a mistake')", 1),
    ("raise KeyboardInterrupt", -signal.SIGINT),
    ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ("import os; os._exit(7)", 7),
    ("import sys, zeroth; raise zeroth.make_error('USAGE', 'x')", 64),
    ("import atexit; atexit.register(print, 'at exit')", 0),
    ("import weakref\nclass Thing: pass\nit = Thing()\nweakref.finalize(it, print, 'its end')", 0),
    ("class Thing:\n def __del__(self): print('its end', flush=True)\nit = Thing()", 0),
    ("import sys; sys.excepthook = lambda *_: print(sys._getframe().f_back); raise ValueError", 1),
    ("import os, sys; print(sys.argv, os.getcwd(), os.environ['OF_TEST'], sorted(os.sched_getaffinity(0)))", 0),
    ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()", 0),
)


class Ends(unittest.TestCase):
    def test_codes_and_output_are_those_of_a_python_of_its_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for text, code in PROGRAMS:
                told = []
                python = [sys.executable] if "zeroth" not in text else forked.python()  # torch is dear
                for command in (python, forked.python()):
                    done = subprocess.run(
                        [*command, "-c", text, "argument"],
                        env={**os.environ, "OF_TEST": 'a "word" \\ and\ttabs'},
                        cwd=folder,
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=False,
                    )
                    with self.subTest(text, command=command[-1]):
                        self.assertEqual(done.returncode, code, done.stderr)
                    told.append((done.stdout, done.stderr.splitlines()[-1:]))
                with self.subTest(text):
                    self.assertEqual(told[1], told[0])

    def test_signals_are_passed_on(self) -> None:
        text = "import signal, time, sys\nsignal.signal(15, lambda *_: sys.exit(5))\n"
        text += "print('ready', flush=True)\ntime.sleep(60)"
        for number, code in ((signal.SIGTERM, 5), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
            with self.subTest(number), job.Family([*forked.python(), "-c", text]) as family:
                family.wait_for("ready", 1)
                family.process.send_signal(number)
                self.assertEqual(family.end(60).returncode, code)

    def test_what_stays_is_found(self) -> None:
        child = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 3)\n    time.sleep(60)"
        file = "import tempfile; open(tempfile.gettempdir() + '/stays', 'w')"
        for text, found in ((child, f"{forked.LEFT} process"), (file, "/stays")):
            for beside in (False, True):
                with (
                    self.subTest(text, beside=beside),
                    self.assertRaisesRegex(AssertionError, found),
                    job.Family([*forked.python(), "-c", text], beside=beside) as family,
                ):
                    family.end(30)


if __name__ == "__main__":
    tier.main()
